"""`anyk info`."""

from anyk.lab.cli.words import Flag, say, say_json


def command(*, json: Flag = False) -> int:
    """Versions, devices, kernels, data sets found, and extras that are missing, with the command that adds them.

    Args:
        json: print JSON instead of words.
    """
    from anyk import info
    from anyk.lab.data.cache import cache_folder

    facts = info.gather(cache=cache_folder())
    if json:
        say_json(facts)
    else:
        say(info.describe(facts))
    return 0
