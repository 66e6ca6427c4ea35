"""A training process's figures in the Prometheus text format."""

import json
from collections.abc import Iterator

from powerguard.trainer.desk import Desk


def metrics(desk: Desk) -> bytes:
    """Return every figure with its help and type; one that is not known is left out."""
    job = json.dumps(desk.job)
    lines: list[str] = []
    described: set[str] = set()
    for name, kind, text, labels, value in _figures(desk):
        full = f"powerguard_trainer_{name}"
        if full not in described:
            described.add(full)
            lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
        lines.append(f"{full}{{job={job}{labels}}} {value}")
    return ("\n".join(lines) + "\n").encode()


def _figures(desk: Desk) -> Iterator[tuple[str, str, str, str, float]]:
    """Yield (name, type, help, further labels, value)."""
    status = desk.status()
    totals = desk.pace.totals
    yield "paused", "gauge", "Training stands still on request (1) or not (0).", "", int(status.paused)
    for phase, count in desk.results.items():
        text = "Checkpoints that were asked for, by how they ended."
        yield "checkpoints_total", "counter", text, f',result="{phase.value}"', count
    gauges: list[tuple[str, str, float | None]] = [
        ("step", "Last training step that ended.", status.step),
        ("step_seconds", "Median duration of a training step.", status.step_time_p50_s),
        ("step_age_seconds", "Time since the last step ended.", status.last_step_age_s),
        (
            "uploads_held",
            "Copies to slower storage wait until an outage is over (1) or not (0).",
            int(status.uploads_held),
        ),
        ("snapshot_step", "Step of the newest whole state in host memory.", status.snapshot_step),
    ]
    if status.last_committed is not None:
        gauges.append(("durable_step", "Step of the newest durable checkpoint.", status.last_committed.step))
        gauges.append(("durable_age_seconds", "Age of the newest durable checkpoint.", status.last_committed.age_s))
    if status.estimate is not None:
        gauges.append(("checkpoint_bytes", "Size of a checkpoint.", status.estimate.bytes))
        gauges.append(("checkpoint_seconds", "What a checkpoint is expected to take.", status.estimate.seconds))
        gauges.append(("checkpoint_stall_seconds", "How long one holds training up.", status.estimate.stall_s))
        gauges.append(("write_bytes_per_second", "Rate that 9 of 10 writes reached.", status.estimate.write_bw_p10))
    yield from ((name, "gauge", text, "", value) for name, text, value in gauges if value is not None)
    counters: list[tuple[str, str, float]] = [
        ("writes_total", "Checkpoints that became durable, asked for or not.", totals.writes),
        ("written_bytes_total", "Bytes of checkpoints that became durable.", totals.bytes),
        ("write_seconds_total", "Time that was spent writing them.", totals.write_s),
        ("stalls_total", "Times that training stood still to be copied or saved.", totals.stalls),
        ("stall_seconds_total", "Time that training stood still to be copied or saved.", totals.stall_s),
        ("periodic_failed_total", "Periodic checkpoints that came to nothing.", totals.failed),
        ("periodic_late_total", "Periodic checkpoints that had to wait for an older one's write.", totals.late),
        ("corrupt_total", "Checkpoints that did not verify, at restore or in idle time.", totals.corrupt),
    ]
    yield from ((name, "counter", text, "", value) for name, text, value in counters)
    if desk.uploads is not None:
        for name, (kind, text, number) in desk.uploads.figures().items():
            yield f"upload_{name}", kind, text, "", number
