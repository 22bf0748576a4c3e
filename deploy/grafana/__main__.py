"""Writes the dashboards: `python -m deploy.grafana FOLDER ...`."""

import sys
from pathlib import Path

from deploy.grafana.block_utilization import BLOCK_UTILIZATION
from deploy.grafana.latency import LATENCY
from deploy.grafana.overview import OVERVIEW

for folder in sys.argv[1:]:
    for board in (OVERVIEW, BLOCK_UTILIZATION, LATENCY):
        (Path(folder) / board.file_name).write_text(board.as_json())
