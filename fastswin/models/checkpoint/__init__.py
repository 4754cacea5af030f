"""Checkpoints of every Swin framework: read safely, recognise, rename, load, save."""

from fastswin.models.checkpoint.detect import LAYOUTS, detect_layout
from fastswin.models.checkpoint.errors import CheckpointError
from fastswin.models.checkpoint.infer import infer_config
from fastswin.models.checkpoint.load import LoadedCheckpoint, load_checkpoint
from fastswin.models.checkpoint.read import read_checkpoint
from fastswin.models.checkpoint.report import LoadReport
from fastswin.models.checkpoint.resize import resize_bias_table
from fastswin.models.checkpoint.save import save_checkpoint

__all__ = [
    "LAYOUTS",
    "CheckpointError",
    "LoadReport",
    "LoadedCheckpoint",
    "detect_layout",
    "infer_config",
    "load_checkpoint",
    "read_checkpoint",
    "resize_bias_table",
    "save_checkpoint",
]
