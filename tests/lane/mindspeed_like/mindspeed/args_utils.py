"""The command line, read once, with all flags that nobody knows."""

import argparse
import sys

_ARGS = None


def get_mindspeed_args():
    global _ARGS
    if _ARGS is None:
        _ARGS = argparse.Namespace(optimizer="adam", optimization_level=2)
        words = sys.argv[1:]
        for place, word in enumerate(words):
            if word.startswith("--"):
                values = words[place + 1 : place + 2]
                is_switch = not values or values[0].startswith("--")
                setattr(_ARGS, word[2:].replace("-", "_"), True if is_switch else values[0])
    return _ARGS
