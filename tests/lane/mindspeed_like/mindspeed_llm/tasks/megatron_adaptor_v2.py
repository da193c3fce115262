"""Takes off whatever MindSpeed has put on, and patches with a list of its own."""

import sys

from mindspeed import features
from mindspeed.args_utils import get_mindspeed_args
from mindspeed.patch_utils import MindSpeedPatchesManager

MindSpeedPatchesManager.remove_patches()
features.patch(get_mindspeed_args())
sys.modules.pop("transformer_engine", None)
