"""The numbered screens in order."""

from __future__ import annotations

from titan_ckpt.tui.pane import Pane
from titan_ckpt.tui.screen_checkpoints import CheckpointsPane
from titan_ckpt.tui.screen_collective import CollectivePane
from titan_ckpt.tui.screen_grid import GridPane
from titan_ckpt.tui.screen_groups import GroupsPane
from titan_ckpt.tui.screen_logs import LogsPane
from titan_ckpt.tui.screen_overview import OverviewPane
from titan_ckpt.tui.screen_training import TrainingPane
from titan_ckpt.tui.screen_waits import WaitsPane

PANES: tuple[type[Pane], ...] = (
    OverviewPane, GridPane, CollectivePane, GroupsPane, LogsPane, WaitsPane, CheckpointsPane, TrainingPane,
)  # fmt: skip
