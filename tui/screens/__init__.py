"""The numbered screens. `PANES` lists them in order; a screen with many kinds of lines keeps them in a `*_rows` module."""

from __future__ import annotations

from titan_ckpt.tui.screens.checkpoints import CheckpointsPane
from titan_ckpt.tui.screens.collective import CollectivePane
from titan_ckpt.tui.screens.grid import GridPane
from titan_ckpt.tui.screens.groups import GroupsPane
from titan_ckpt.tui.screens.logs import LogsPane
from titan_ckpt.tui.screens.overview import OverviewPane
from titan_ckpt.tui.screens.training import TrainingPane
from titan_ckpt.tui.screens.waits import WaitsPane
from titan_ckpt.tui.widgets.pane import Pane

PANES: tuple[type[Pane], ...] = (
    OverviewPane, GridPane, CollectivePane, GroupsPane, LogsPane, WaitsPane, CheckpointsPane, TrainingPane,
)  # fmt: skip
