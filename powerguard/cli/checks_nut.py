"""What doctor asks of a upsd, and what it says about the answers."""

from powerguard.cli.checks_return import restart_charge
from powerguard.clock import boottime_s
from powerguard.core.readings import Reading
from powerguard.effectors.host_findings import Finding
from powerguard.sources.nut import NutSource
from powerguard.sources.nut_link import LinkError
from powerguard.sources.nut_options import NutOptions


async def nut_findings(name: str, options: NutOptions, *, ups: str) -> tuple[Reading | None, list[Finding]]:
    """Look at one UPS behind upsd. The reading is None when there is none."""
    try:
        report = await NutSource(options, ups=ups, clock=boottime_s).look()
    except LinkError as error:
        return None, [Finding(name, "FAIL", str(error), "check host, port and name; `upsc -l HOST` lists the UPSes")]
    reading = report.reading
    runtime = "no runtime" if reading.runtime_s is None else f"runtime {reading.runtime_s:.0f} s"
    charge = "no charge" if reading.charge_pct is None else f"charge {reading.charge_pct:.0f} %"
    load = "no load" if reading.load_pct is None else f"load {reading.load_pct:.0f} %"
    held = f"; logs in as {options.user}" if report.is_logged_in else ""
    tls = "TLS" if report.tls else "no TLS"
    text = f"{reading.output_source}, {charge}, {load}, {runtime} (nut; {1000 * report.latency_s:.0f} ms; {tls}{held})"
    found = [Finding(name, "PASS", text)]
    if report.forgeable:
        found.append(Finding(name, "WARN", f"its answers could be forged: {report.forgeable}", "tls: required"))
    if options.user is None:
        text = "no login: a NUT primary does not wait for this host before it cuts the output"
        found.append(Finding(name, "WARN", text, "set user and password, with an upsmon line in upsd.users"))
    if reading.load_pct is None and reading.watts is None:
        found.append(Finding(name, "WARN", "tells no load: counted as full", ""))
    fix = f"upsrw -s battery.charge.restart=25 {options.name}@{options.host}, where its driver lets it be set"
    found += restart_charge(name, report.restart_pct, fix)
    return reading, [*found, *(Finding(name, "WARN", warning, "") for warning in report.warnings)]
