"""Chat completions on S3 -> masked training tokens on S3.

    s3 objects ─plan→ partitions ─read→ lines ─parse→ Conversation ─render→ Rendered(text, trained spans)
        ─encode→ token ids ─mask→ loss mask ─table→ pa.Table[SCHEMA] ─to_parquet→ one part on s3, one receipt

    from etl import RunConfig, run
    result = run(
        RunConfig(input="s3://bucket/completions/", output="s3://bucket/tokens/", tokenizer="Qwen/Qwen3.6-27B")
    )

Everything public is imported on first use, so that a worker that needs the stages alone loads no more than them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etl.audit import CheckResult, check
    from etl.config import RunConfig
    from etl.inspection import Preview, normalize, preview
    from etl.jobs import PlanResult, RunResult, frame, plan, run
    from etl.schema import SCHEMA
    from etl.summary import Report, report

__all__ = [
    "SCHEMA",
    "CheckResult",
    "PlanResult",
    "Preview",
    "Report",
    "RunConfig",
    "RunResult",
    "check",
    "frame",
    "normalize",
    "plan",
    "preview",
    "report",
    "run",
]
__version__ = "0.1.0"

_HOMES = {
    "RunConfig": "config",
    "SCHEMA": "schema",
    "PlanResult": "jobs",
    "RunResult": "jobs",
    "CheckResult": "audit",
    "check": "audit",
    "Report": "summary",
    "report": "summary",
    "Preview": "inspection",
    "normalize": "inspection",
    "preview": "inspection",
    "frame": "jobs",
    "plan": "jobs",
    "run": "jobs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'etl' has no attribute {name!r}")
    return getattr(importlib.import_module(f"etl.{_HOMES[name]}"), name)
