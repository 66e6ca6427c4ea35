"""What doctor asks of an apcupsd, and what it says about the answers."""

from typing import Final

from powerguard.cli.checks_return import restart_charge
from powerguard.core.readings import Reading
from powerguard.effectors.host_findings import Finding
from powerguard.protocols.nis import NisError
from powerguard.sources.apcupsd import probe
from powerguard.sources.apcupsd_options import ApcupsdOptions

_OLD_S: Final = 6.0


async def apcupsd_findings(name: str, options: ApcupsdOptions, *, ups: str) -> tuple[Reading | None, list[Finding]]:
    """Look at the UPS behind one apcupsd. The reading is None when there is none."""
    try:
        report = await probe(options, ups=ups)
    except NisError as error:
        fix = "apcupsd.conf there: NETSERVER on, NISIP of that network, NISPORT; `apcaccess -h HOST:PORT` asks too"
        return None, [Finding(name, "FAIL", str(error), fix)]
    reading = report.reading
    if reading is None:
        return None, [Finding(name, "FAIL", report.why_not, "systemctl status apcupsd there")]
    runtime = "no runtime" if reading.runtime_s is None else f"runtime {reading.runtime_s:.0f} s"
    charge = "no charge" if reading.charge_pct is None else f"charge {reading.charge_pct:.0f} %"
    load = "no load" if reading.load_pct is None else f"load {reading.load_pct:.0f} %"
    age = "age not told" if report.age_s is None else f"{max(0.0, report.age_s):.0f} s old"
    text = f"{reading.output_source}, {charge}, {load}, {runtime} (apcupsd {report.name or 'without a name'}; {age})"
    found = [Finding(name, "PASS", text)]
    if report.age_s is not None and report.age_s > _OLD_S:
        text = f"apcupsd looked at its UPS {report.age_s:.0f} s ago: an outage is seen as late as its POLLTIME allows"
        found.append(Finding(name, "WARN", text, "POLLTIME 1 in its apcupsd.conf"))
    if report.slave:
        text = "a net slave does not tell how old its news is"
        found.append(Finding(name, "WARN", text, "name its master in the settings (DEVICE in its apcupsd.conf)"))
    if report.shutting_down:
        text = "SHUTTING DOWN since an earlier outage: that apcupsd orders no shutdown any more"
        found.append(Finding(name, "WARN", text, "systemctl restart apcupsd there"))
    if reading.load_pct is None:
        found.append(Finding(name, "WARN", "tells no load: counted as full", ""))
    fix = "set it to 25 % in the UPS: apctest, with apcupsd stopped, edits its EEPROM; or the menu of its panel"
    return reading, [*found, *restart_charge(name, report.restart_pct, fix)]
