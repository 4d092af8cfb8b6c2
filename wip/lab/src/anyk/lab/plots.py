"""The picture of the report: test accuracies with their intervals, as SVG."""

import base64
import io

import matplotlib
from matplotlib.figure import Figure

from anyk.lab.findings import Findings
from anyk.lab.verdict import title

COLOURS = ("#0b62a4", "#a8450a", "#0a6b4f", "#7a3f9d", "#5b6672", "#b0890a")


def accuracies(found: Findings) -> str:
    """For each judged metric the difference of every method to softmax, with its interval, as a data URI; "" if there is none."""
    methods = [method for method in found.methods[1:] if method.role != "reference" and method.runs]
    if not methods:
        return ""
    with matplotlib.rc_context({"svg.hashsalt": "anyk", "font.size": 9, "text.color": "#5b6672", "axes.labelcolor": "#5b6672"}):
        figure = Figure(figsize=(3.6 * len(found.judged), 0.6 + 0.35 * len(methods)), layout="constrained")
        for number, metric in enumerate(found.judged, start=1):
            axes = figure.add_subplot(1, len(found.judged), number)
            for place, method in enumerate(reversed(methods)):
                one = found.differences.get((method.name, metric))
                if one is None:
                    continue
                colour = COLOURS[methods.index(method) % len(COLOURS)]
                if one.low is not None and one.high is not None:
                    axes.plot([100 * one.low, 100 * one.high], [place, place], color=colour, linewidth=2)
                axes.plot([100 * one.difference], [place], "o", color=colour)
            axes.axvline(0, color="#9aa6b2", linewidth=1, linestyle="--")
            axes.set_yticks(range(len(methods)), [method.name for method in reversed(methods)] if number == 1 else [])
            axes.set_xlabel(f"{title(metric)}, points against softmax")
            axes.tick_params(colors="#5b6672")
            axes.spines[["top", "right", "left"]].set_visible(False)
        content = io.BytesIO()
        figure.savefig(content, format="svg", transparent=True, metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(content.getvalue()).decode()}"
