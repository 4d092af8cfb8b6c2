"""`anyk info`."""

from anyk.lab.cli.words import Flag, say, say_json


def command(*, json: Flag = False) -> int:
    """Print what a bug report needs: versions, machine, devices, kernels, and extras that are missing.

    Args:
        json: print JSON instead of text.
    """
    from anyk import info
    from anyk.lab.data.cache import cache_folder

    facts = info.gather() | {"cache": str(cache_folder())}
    if json:
        say_json(facts)
    else:
        say(info.describe(facts))
    return 0
