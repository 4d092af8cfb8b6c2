"""Models that are not the lab's own: a function of yours by `module:function`, one of timm's by `timm:NAME`.

A file that names a function must not decide what is imported: see :func:`maker`.
"""

import contextlib
import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from anyk.lab.errors import LabError, first_line

SEQUENCE_MODELS = ("context", "gru", "attention")
"""The lab's own that take tokens."""
BUILT_IN = ("linear", "mlp", "cnn", "resnet18", *SEQUENCE_MODELS)
"""The lab's own."""

Maker = Callable[[tuple[int, ...], int], nn.Module]
"""What makes a model: gets the shape of one example and the number of classes."""

# No second colon and no slash: timm's hf-hub:… and local-dir:… would bring code and weights from elsewhere.
_TIMM = re.compile(r"timm:([\w.-]+)(:pretrained)?", re.ASCII)
_FUNCTION = re.compile(r"(?!timm:)([^\W\d][\w.]*):([^\W\d][\w.]*)")


def is_word(word: str) -> bool:
    """Whether this can name a model: one of the lab's, `module:function`, `timm:NAME` or `timm:NAME:pretrained`."""
    return word in BUILT_IN or bool(_TIMM.fullmatch(word) or _FUNCTION.fullmatch(word))


def is_timm(word: str) -> bool:
    """Whether the word names a model of timm."""
    return bool(_TIMM.fullmatch(word))


def is_function(word: str) -> bool:
    """Whether the word names a function, which has to be imported: code that somebody wrote."""
    return bool(_FUNCTION.fullmatch(word))


def word_of(model: str | Maker) -> str:
    """The word for ``Setting.model`` that names this model: a word as it is, a function of a module as ``module:function``.

    Args:
        model: a word, or what is called with the shape of one example and the number of classes and returns an nn.Module.
    """
    if isinstance(model, str):
        return model
    module, name = getattr(model, "__module__", None), getattr(model, "__qualname__", None)
    if isinstance(model, nn.Module) or not callable(model) or not module or not name:
        kind = type(model).__name__
        raise LabError(f"model should be a word or a function that makes a new model for each run, but is a {kind}.")
    way = "runs are processes of their own that import it, also after a kill: move it into a file such as my_models.py"
    if module == "__main__":
        raise LabError(f"model {name} is defined in the script or notebook itself; {way} and import it from there.")
    word = f"{module}:{name}"
    try:
        same = is_function(word) and find(word) is model
    except LabError:
        same = False
    if not same:
        raise LabError(f"model {name} of {module} is not found under its name there; {way}, at the top level.")
    return word


def maker(word: str, source: str, model: str | Maker | None = None, trust: bool = False) -> Maker | None:
    """What makes the model that a file names; None for the models of the lab and of timm, which need nobody's leave.

    Args:
        word: the model's name in the file.
        source: the file.
        model: the caller's own answer, a function or its word: what the file names is then not imported.
        trust: whether to import what the file names.
    """
    if model is not None:
        return find(model) if isinstance(model, str) else model
    if not is_function(word):
        return None
    if not trust:
        raise LabError(
            f"{source} names the model {word}, which is code that reading a file does not import: "
            f"name the function (--model {word}, in Python model={word!r} or trust=True) if the file is yours."
        )
    return find(word)


def find(word: str, what: str = "model") -> Callable[..., Any]:
    """The function that `module:function` names; modules in the working folder are found."""
    module, _, name = word.partition(":")
    with working_folder_on_path():
        try:
            found: Any = importlib.import_module(module)
        except Exception as error:  # whatever the module does while it is imported
            raise LabError(f"{what} {word} cannot be imported ({message(error, sys.modules.get(module))}).") from None
        for part in name.split("."):
            if not hasattr(found, part):
                raise LabError(f"{what} {word} is not found: {module} has no {name}.")
            found = getattr(found, part)
    if not callable(found):
        raise LabError(f"{what} {word} should be a function, but is a {type(found).__name__}.")
    return found


def make(
    word: str,
    shape: tuple[int, ...],
    classes: int,
    *,
    function: Maker | None = None,
    pretrained: bool = True,
    tokens: bool = False,
) -> nn.Module:
    """A new model that was seen to work, unless its weights are to follow: two examples give two rows of finite scores.

    Args:
        word: `module:function`, `timm:NAME` or `timm:NAME:pretrained`.
        shape: of one example.
        classes: their number.
        function: instead of what the word names.
        pretrained: whether timm may fetch weights; not where others are read afterwards.
        tokens: whether it takes integers: 0 to classes + 1.
    """
    if function is None and is_timm(word):
        model = _of_timm(word, shape, classes, pretrained)
        if not pretrained:  # the weights of a file follow, and its shape may be any: images of it are not to be made up
            return model
    else:
        function = function or find(word)
        with working_folder_on_path():
            try:
                model = function(shape, classes)
            except Exception as error:
                source = sys.modules.get(getattr(function, "__module__", ""))
                raise LabError(f"model {word} failed when called with {shape}, {classes} ({message(error, source)}).") from None
    _try(model, word, shape, classes, tokens)
    return model


def _of_timm(word: str, shape: tuple[int, ...], classes: int, pretrained: bool) -> Any:
    match = _TIMM.fullmatch(word)
    assert match is not None
    try:
        timm = importlib.import_module("timm")
    except Exception as error:  # installed, but not for this torch
        raise LabError(f"model {word} needs timm ({message(error)}): pip install timm") from None
    try:
        return timm.create_model(match[1], pretrained=bool(match[2]) and pretrained, num_classes=classes, in_chans=shape[0])
    except Exception as error:  # unknown names, failed downloads
        raise LabError(f"timm cannot make {match[1]} ({message(error)}).") from None


def _try(model: Any, word: str, shape: tuple[int, ...], classes: int, tokens: bool) -> None:
    """Raise unless the model can be trained and saved. Lazy layers learn their sizes here, before an optimizer asks."""
    if not isinstance(model, nn.Module):
        raise LabError(f"model {word} should return an nn.Module, but returned a {type(model).__name__}.")
    generator = torch.Generator().manual_seed(0)
    inputs = (
        torch.randint(classes + 2, (2, *shape), generator=generator) if tokens else torch.randn(2, *shape, generator=generator)
    )
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    training = model.training
    try:
        with torch.no_grad():
            scores: Any = model.eval()(inputs.to(device))
    except Exception as error:
        source = sys.modules.get(type(model).__module__)
        raise LabError(f"model {word} failed on two examples of shape {shape} ({message(error, source)}).") from None
    finally:
        model.train(training)
    if not isinstance(scores, Tensor) or scores.shape != (2, classes):
        came = f"the shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
        raise LabError(f"model {word} should give scores of shape (2, {classes}) for two examples, but gives {came}.")
    if not scores.is_floating_point() or not bool(scores.isfinite().all()):
        raise LabError(f"model {word} should give finite scores, but gives {scores.dtype} with {scores.flatten()[0].item()}.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise LabError(f"model {word} has no parameter that can be trained: requires_grad is False for all.")
    odd = next((name for name, value in model.state_dict().items() if not isinstance(value, Tensor)), None)
    if odd is not None:
        raise LabError(f"model {word} has {odd} in its state_dict, which is no tensor and cannot be saved.")


def head_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of a model's last layer: what its ``head_parameters()`` or timm's ``get_classifier()`` gives, or those of
    the last nn.Linear in it."""
    if hasattr(model, "head_parameters"):
        given: Any = model.head_parameters
        head = list(given())
    elif hasattr(model, "get_classifier"):
        given = model.get_classifier
        head = list(given().parameters())
    else:
        linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        head = list(linear[-1].parameters()) if linear else []
    own = {id(parameter) for parameter in model.parameters()}
    if not head or not all(id(parameter) in own for parameter in head):
        raise LabError(
            "head_learning_rate needs a head: the model has no nn.Linear, and no head_parameters() that gives some of its own."
        )
    return head


@contextlib.contextmanager
def working_folder_on_path() -> Iterator[None]:
    """As `python -m` does: a module beside the user is found."""
    here = os.getcwd()
    if here in sys.path:
        yield
        return
    sys.path.insert(0, here)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(here)


def message(error: Exception, module: ModuleType | None = None) -> str:
    """An error of somebody's code in one line, with the line of the module that it came from."""
    kind, line = type(error).__name__, first_line(error)
    text = kind if line == kind else f"{kind}: {line[:200]}"
    file = getattr(module, "__file__", None)
    places = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{text}, line {places[-1]} of {os.path.basename(str(file))}" if places else text
