"""Patches when it is imported."""

from mindspeed import features
from mindspeed.args_utils import get_mindspeed_args

features.patch(get_mindspeed_args())
