"""powerguard-gpu as a real process, behind NVIDIA's own Python bindings, against an NVML whose GPUs are files.

Whatever happens to it, the limits that it found come back: that is what most of these tests are about.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from powerguard.clock import boot_id
from powerguard.effectors.gpu.helper import checked
from powerguard.effectors.host.check import LOOK_LIMIT_S
from powerguard.effectors.host.look import GPU_LIMIT_S
from tests.peers.nvml import HELPER, Gpus, did, until

ROOT = Path(__file__).parents[3]
SET = "DeviceSetPowerManagementLimit"
LOST, NOT_PERMITTED, NOT_SUPPORTED = 15, 4, 3

pytestmark = pytest.mark.peer("cc")


# --- What it does ---------------------------------------------------------------------------------------------------


def test_list_shows_everything_and_changes_nothing(gpus: Gpus) -> None:
    answer = gpus.ask("list")
    assert (answer["schema_version"], answer["ok"], answer["capped"], len(answer["gpus"])) == (1, True, 0, 2)
    assert answer["gpus"][1] == {
        "index": 1,
        "uuid": "GPU-00000001-0000-0000-0000-000000000000",
        "name": "NVIDIA H100 80GB HBM3",
        "limit_w": 700.0,
        "default_w": 700.0,
        "min_w": 200.0,
        "max_w": 700.0,
        "power_w": 650.123,
        "utilization_pct": 98,
        "throttled": [],
        "mig": False,
        "persistent": True,
        "settable": os.geteuid() == 0,
        "because": "" if os.geteuid() == 0 else answer["gpus"][1]["because"],
    }
    assert gpus.calls(SET) == []
    assert list(gpus.folder.iterdir()) == []


def test_the_draw_of_this_moment_is_reported_where_the_board_has_it(gpus: Gpus) -> None:
    """The usual value of a Hopper is a mean of the last second, and still that of training after a pause."""
    gpus.put(0, "power_instant_mw", 146_000)
    assert [gpu["power_w"] for gpu in gpus.ask("list")["gpus"]] == [146.0, 650.123]
    gpus.fail("DeviceGetFieldValues", 13, 1)
    assert gpus.ask("list")["gpus"][1]["power_w"] == 650.123


def test_cap_and_restore(gpus: Gpus) -> None:
    """The answer names each GPU and the watts; twice is as good as once; and nothing is left behind."""
    gpus.put(1, "limit_mw", 500_000)
    reply = gpus.ask("cap", 0.6)
    assert (reply["ok"], did(reply), reply["watts_before"], reply["watts_after"]) == (True, ["capped"] * 2, 1200, 720)
    assert gpus.watts() == [420, 300]
    again = gpus.ask("cap", 0.6)
    assert (again["ok"], did(again), again["watts_before"], again["watts_after"]) == (True, ["kept"] * 2, 1200, 720)
    assert gpus.ask("list")["capped"] == 2
    back = gpus.ask("restore")
    assert (back["ok"], did(back), back["watts_after"]) == (True, ["restored"] * 2, 1200)
    assert gpus.watts() == [700, 500]
    assert not gpus.limits.exists()
    nothing = gpus.ask("restore")
    assert (nothing["ok"], nothing["gpus"]) == (True, [])


def test_what_was_found_is_in_the_file_before_the_first_limit_is_touched(gpus: Gpus) -> None:
    with gpus.hanging(SET, 0), gpus.hanging(SET, 1):
        process = gpus.start("cap", "0.6")
        until(lambda: len(gpus.calls(SET)) == 2)
        kept = json.loads(gpus.limits.read_text())
        assert kept["boot_id"] == boot_id()
        assert [(gpu["found_mw"], gpu["set_mw"]) for gpu in kept["gpus"]] == [(700_000, [420_000])] * 2
        assert gpus.watts() == [700, 700]
        process.kill()


def test_no_gpu_is_set_below_what_it_allows_and_none_is_raised(gpus: Gpus) -> None:
    """One whose least limit is above the share; one that an operator had already set lower than that."""
    gpus.put(0, "min_mw", 600_000)
    gpus.put(1, "limit_mw", 200_000)
    answer = gpus.ask("cap", 0.5)
    assert (gpus.watts(), did(answer)) == ([600, 200], ["capped", "at_minimum"])
    assert gpus.ask("restore")["ok"]
    assert gpus.watts() == [700, 200]
    assert gpus.calls(SET) == ["0 600000", "0 700000"]


def test_where_nothing_can_be_lowered_nothing_was_capped(gpus: Gpus) -> None:
    for index in (0, 1):
        gpus.put(index, "limit_mw", 200_000)
    answer = gpus.ask("cap", 0.6)
    assert not answer["ok"]
    assert answer["error"] == "no GPU was capped: its lowest limit is 200 W"
    assert not gpus.limits.exists()


def test_a_second_cap_goes_lower_but_never_up_and_never_forgets_what_was_found_first(gpus: Gpus) -> None:
    gpus.ask("cap", 0.6)
    assert did(gpus.ask("cap", 0.8)) == ["kept", "kept"]
    assert gpus.watts() == [420, 420]
    assert did(gpus.ask("cap", 0.5)) == ["capped", "capped"]
    assert gpus.watts() == [350, 350]
    assert gpus.ask("restore")["ok"]
    assert gpus.watts() == [700, 700]


def test_a_gpu_that_appears_later_is_capped_by_the_second_cap(gpus: Gpus) -> None:
    gpus.fail("DeviceGetHandleByIndex", 999, 1)
    first = gpus.ask("cap", 0.6)
    assert (first["ok"], did(first)) == (True, ["capped", "failed"])
    gpus.fail("DeviceGetHandleByIndex", 0, 1)
    assert did(gpus.ask("cap", 0.6)) == ["kept", "capped"]
    assert gpus.ask("restore")["ok"]
    assert gpus.watts() == [700, 700]


# --- Others set limits, too -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("theirs_w", [300, 600])
def test_what_an_operator_sets_meanwhile_is_left_alone_and_reported(gpus: Gpus, theirs_w: int) -> None:
    gpus.ask("cap", 0.6)
    gpus.put(0, "limit_mw", theirs_w * 1000)
    assert did(gpus.ask("cap", 0.5)) == ["left_alone", "capped"]
    back = gpus.ask("restore")
    assert (back["ok"], did(back)) == (True, ["left_alone", "restored"])
    assert back["gpus"][0]["because"] == (f"another program has set {theirs_w} W since (700 W was found): left alone")
    assert gpus.watts() == [theirs_w, 700]
    assert not gpus.limits.exists()
    assert gpus.ask("cap", 0.5)["ok"], "what they set is what is found the next time"
    assert gpus.watts() == [max(theirs_w / 2, 200), 350]


def test_a_driver_that_rounds_is_no_operator(gpus: Gpus) -> None:
    gpus.ask("cap", 0.6)
    gpus.put(0, "limit_mw", 420_400)
    assert did(gpus.ask("restore")) == ["restored", "restored"]
    assert gpus.watts() == [700, 700]


# --- It goes wrong --------------------------------------------------------------------------------------------------


def test_one_gpu_that_refuses_does_not_spare_the_others(gpus: Gpus) -> None:
    gpus.fail(SET, NOT_PERMITTED, 1)
    answer = gpus.ask("cap", 0.6)
    assert (answer["ok"], did(answer), gpus.watts()) == (True, ["capped", "failed"], [420, 700])
    assert "CAP_SYS_ADMIN" in answer["gpus"][1]["because"]
    back = gpus.ask("restore")
    assert (back["ok"], did(back), gpus.watts()) == (True, ["restored", "kept"], [700, 700])
    assert not gpus.limits.exists()


def test_a_limit_that_does_not_read_back_is_a_failure(gpus: Gpus) -> None:
    gpus.put(0, "deaf", 1)
    answer = gpus.ask("cap", 0.6)
    assert did(answer) == ["failed", "capped"]
    assert answer["gpus"][0]["because"] == "reads 700 W after 420 W was set"
    assert gpus.ask("restore")["ok"]


def test_where_no_gpu_can_be_capped_the_reasons_are_reported(gpus: Gpus) -> None:
    gpus.fail(SET, NOT_SUPPORTED, 0)
    gpus.fail("DeviceGetPowerManagementLimit", LOST, 1)
    answer = gpus.ask("cap", 0.6)
    assert not answer["ok"]
    assert "no power limit that can be set" in answer["error"]
    assert "fallen off the bus" in answer["error"]


def test_a_restore_that_fails_is_kept_and_tried_again(gpus: Gpus) -> None:
    gpus.ask("cap", 0.6)
    gpus.fail(SET, 999, 1)
    answer = gpus.ask("restore")
    assert (answer["ok"], did(answer), gpus.watts()) == (False, ["restored", "failed"], [700, 420])
    assert "GPU 1: nvmlDeviceSetPowerManagementLimit: Unknown Error (999)" in answer["error"]
    assert [gpu["index"] for gpu in json.loads(gpus.limits.read_text())["gpus"]] == [1]
    gpus.fail(SET, 0, 1)
    assert gpus.ask("restore")["ok"]
    assert (gpus.watts(), gpus.limits.exists()) == ([700, 700], False)


def test_a_file_that_cannot_be_written_keeps_no_limit_down(gpus: Gpus) -> None:
    """As where /run is full: what was found is known, and removing the file takes no room."""
    gpus.ask("cap", 0.6)
    (gpus.folder / ".limits.json.new").mkdir()
    gpus.fail(SET, 999, 1)
    answer = gpus.ask("restore")
    assert (answer["ok"], "cannot write" in answer["error"], gpus.watts()) == (False, True, [700, 420])
    gpus.fail(SET, 0, 1)
    assert gpus.ask("restore")["ok"]
    assert (gpus.watts(), gpus.limits.exists()) == ([700, 700], False)


def test_a_gpu_that_falls_off_the_bus_does_not_hold_up_the_others(gpus: Gpus) -> None:
    """It is told, and remembered in case that it comes back as it was."""
    gpus.ask("cap", 0.6)
    gpus.fail("DeviceGetHandleByIndex", LOST, 0)
    answer = gpus.ask("restore")
    assert (answer["ok"], did(answer), gpus.watts()) == (True, ["gone", "restored"], [420, 700])
    assert gpus.limits.exists()
    gpus.fail("DeviceGetHandleByIndex", 0, 0)
    assert did(gpus.ask("restore")) == ["restored"]
    assert (gpus.watts(), gpus.limits.exists()) == ([700, 700], False)


def test_a_gpu_that_was_reset_meanwhile_is_capped_from_what_it_has_now(gpus: Gpus) -> None:
    """A reset forgets limits: an entry of before it must not decide for ever that "somebody else" has set this one."""
    gpus.put(0, "limit_mw", 500_000)
    gpus.ask("cap", 0.6)
    gpus.fail("DeviceGetHandleByIndex", LOST, 0)
    gpus.ask("restore")
    gpus.fail("DeviceGetHandleByIndex", 0, 0)
    gpus.put(0, "limit_mw", 700_000)
    assert did(gpus.ask("cap", 0.5)) == ["capped", "capped"]
    assert gpus.ask("restore")["ok"]
    assert gpus.watts() == [700, 700]


def test_a_gpu_whose_driver_hangs_is_reported_in_time_and_the_others_are_capped(gpus: Gpus) -> None:
    """The hang ends neither the answer nor the turn of the next one; and once it is over, all come back."""
    with gpus.hanging(SET, 0):
        began_s = time.monotonic()
        reply = gpus.ask("cap", 0.6)
        assert time.monotonic() - began_s < 30  # 4 s here, and it would hang for ever
        assert (reply["ok"], did(reply), gpus.watts()) == (True, ["failed", "capped"], [700, 420])
        assert "the NVIDIA driver hangs" in reply["gpus"][0]["because"]
    gpus.fail("DeviceGetUUID", 999, 0)
    back = gpus.ask("restore")
    assert (back["ok"], did(back), gpus.watts()) == (False, ["failed", "restored"], [700, 700])
    gpus.fail("DeviceGetUUID", 0, 0)
    gpus.put(0, "limit_mw", 420_000)  # the call that hung has got through at last
    assert gpus.ask("restore")["ok"]
    assert gpus.watts() == [700, 700]


def test_an_nvml_that_hangs_as_a_whole_is_reported_in_time(gpus: Gpus) -> None:
    with gpus.hanging("InitWithFlags"):
        process = gpus.start("cap", "0.6", "--within-s", "1")
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert json.loads(out)["error"].startswith("no answer within 0.")


@pytest.mark.parametrize(
    ("function", "code", "words"),
    [
        ("InitWithFlags", 9, "modprobe nvidia"),
        ("InitWithFlags", 18, "differ, as after an update: reboot"),
        ("InitWithFlags", 4, "CAP_SYS_ADMIN"),
        ("DeviceGetCount", 999, "nvmlDeviceGetCount: Unknown Error (999): look for Xid in dmesg; reset the GPU"),
    ],
)
def test_an_nvml_that_fails_as_a_whole_says_what_would_be_right(
    gpus: Gpus, function: str, code: int, words: str
) -> None:
    gpus.fail(function, code)
    for word, share in (("list", None), ("cap", 0.6)):
        answer = gpus.ask(word, share)
        assert not answer["ok"]
        assert words in answer["error"]


def test_a_library_that_cannot_be_loaded_is_named(gpus: Gpus, tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("no library\n")
    gpus.environment["LD_LIBRARY_PATH"] = str(tmp_path)
    assert "libnvidia-ml.so.1 is not there" in gpus.ask("list")["error"]


def test_without_nvidia_ml_py_it_says_so_and_needs_nothing_else(gpus: Gpus) -> None:
    """Run without any installed package: only the standard library and our own files are there."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from powerguard.effectors.gpu.helper import main; main()"
    argv = [sys.executable, "-I", "-S", "-c", code, "list", "--folder", str(gpus.folder)]
    ended = subprocess.run(argv, env=gpus.environment, capture_output=True, text=True, check=False, timeout=60)
    assert "pip install '.[gpu]' in a checkout" in json.loads(ended.stdout)["error"], ended.stderr


def test_a_host_without_gpus_has_nothing_to_cap(tmp_path: Path) -> None:
    gpus = Gpus(tmp_path, count=0)
    assert gpus.ask("list")["gpus"] == []
    assert gpus.ask("cap", 0.6)["error"] == "no GPU was capped: NVML reports none"
    assert gpus.ask("restore")["ok"]


def test_mig_and_what_a_gpu_does_not_report(gpus: Gpus) -> None:
    """A limit is one of the whole GPU, whoever's instances it is cut into; utilization is then not told."""
    gpus.put(0, "mig", 1)
    for name in ("utilization_pct", "power_mw", "persistence", "default_mw"):
        gpus.forget(0, name)
    gpu = gpus.ask("list")["gpus"][0]
    assert (gpu["mig"], gpu["utilization_pct"], gpu["power_w"], gpu["persistent"]) == (True, None, None, None)
    assert did(gpus.ask("cap", 0.6)) == ["capped", "capped"]


def test_health_has_time_for_a_driver_that_must_wake_its_gpus() -> None:
    """After a boot nothing keeps eight of them awake: 1 to 3 s for each. The host check waits for the answer."""
    assert checked({"word": "list"}).within_s == 4.0
    assert 16.0 <= checked({"word": "health"}).within_s < GPU_LIMIT_S < LOOK_LIMIT_S


def test_health_names_who_is_there_and_who_wants_a_reset(gpus: Gpus) -> None:
    """A GPU whose limit cannot be set is as well as any; one that fell off the bus is told beside the others."""
    gpus.fail("DeviceGetPowerManagementLimit", NOT_SUPPORTED, 0)
    first, second = gpus.ask("health")["gpus"]
    assert first == {
        "index": 0,
        "uuid": "GPU-00000000-0000-0000-0000-000000000000",
        "name": "NVIDIA H100 80GB HBM3",
        "pending": [],
        "worn": False,
        "memory_errors": 0,
        "because": "",
    }
    gpus.put(0, "remap_pending", 1)
    gpus.put(0, "remap_failed", 1)
    gpus.forget(1, "remap_pending")
    gpus.put(1, "retire_pending", 1)
    gpus.put(0, "ecc_uncorrected", 3)
    gpus.forget(1, "ecc_uncorrected")
    first, second = gpus.ask("health")["gpus"]
    assert (first["pending"], first["worn"], first["memory_errors"]) == (["row_remap"], True, 3)
    assert (second["pending"], second["worn"], second["memory_errors"]) == (["page_retirement"], None, None)
    gpus.fail("DeviceGetUUID", LOST, 1)
    first, second = gpus.ask("health")["gpus"]
    assert (first["because"], second["uuid"], "off the bus" in second["because"]) == ("", None, True)
    assert gpus.calls(SET) == []
    assert list(gpus.folder.iterdir()) == []


def test_two_at_once_take_turns_and_do_not_wait_for_ever(gpus: Gpus) -> None:
    with gpus.hanging(SET, 0):
        gpus.start("cap", "0.6", "--within-s", "60")
        until(lambda: len(gpus.calls(SET)) == 2)
        answer = gpus.ask("restore")
    assert not answer["ok"]
    assert "another powerguard-gpu is still at work" in answer["error"]


# --- The file -------------------------------------------------------------------------------------------------------


def test_a_file_of_another_boot_is_removed_and_believed_in_nothing(gpus: Gpus) -> None:
    """Limits do not survive a reboot: to "restore" them would raise what the new boot has set."""
    gpus.ask("cap", 0.6)
    kept = json.loads(gpus.limits.read_text())
    gpus.limits.write_text(json.dumps({**kept, "boot_id": "of-another-boot", "schema_version": 99}))
    answer = gpus.ask("restore")
    assert (answer["ok"], answer["gpus"], gpus.watts()) == (True, [], [420, 420])
    assert not gpus.limits.exists()


@pytest.mark.parametrize(
    "text",
    [
        '{"schema_version": 1, "boot_id": "BOOT", TIMES, "gpus": [1]}',
        '{"schema_version": 1, "boot_id": "BOOT", TIMES, "gpus": [{"uuid": "u", "found_mw": 700000, "set_mw": 1}]}',
        '{"schema_version": 1, "boot_id": "BOOT", TIMES, "gpus": [{WHO, "found_mw": -1, "set_mw": [], "gone": false}]}',
    ],
)
def test_a_file_that_makes_no_sense_stops_us_and_is_left_for_a_person(gpus: Gpus, text: str) -> None:
    """With what was found forgotten, the next cap would take our own limit for it."""
    text = text.replace("BOOT", boot_id()).replace("WHO", '"uuid": "u", "index": 0, "name": "n"')
    text = text.replace("TIMES", '"capped_s": 1, "ordered_s": 0, "tries": 0, "tried_s": 0')
    gpus.limits.write_text(text)
    for word, share in (("cap", 0.6), ("restore", None)):
        answer = gpus.ask(word, share)
        assert not answer["ok"]
        assert "nvidia-smi --power-limit" in answer["error"]
    assert (gpus.watts(), gpus.limits.read_text(), gpus.calls(SET)) == ([700, 700], text, [])


def test_a_folder_that_cannot_be_written_caps_nothing(gpus: Gpus) -> None:
    gpus.folder.rmdir()
    answer = gpus.ask("cap", 0.6)
    assert not answer["ok"]
    assert str(gpus.folder) in answer["error"]
    assert gpus.watts() == [700, 700]


# --- What it is told ------------------------------------------------------------------------------------------------


def test_what_is_not_a_word_is_refused_before_nvml_is_touched(gpus: Gpus) -> None:
    answer = gpus.say(b'{"word": "off"}\n')
    assert (answer["word"], answer["ok"]) == ("", False)
    assert "the words are list, health, cap, restore, hold" in answer["error"]
    assert not (gpus.world / "calls").exists()


def test_whoever_says_nothing_is_not_waited_for(gpus: Gpus) -> None:
    assert gpus.start("serve").communicate(b"", timeout=60) == (b"", b"")


def test_whoever_hangs_up_gets_his_cap_all_the_same(gpus: Gpus) -> None:
    process = gpus.start("serve")
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.close()
    process.stdin.write(b'{"word": "cap", "share": 0.6}\n')
    process.stdin.close()
    assert process.wait(timeout=60) == 0
    assert gpus.watts() == [420, 420]


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["list"], 0),
        (["cap", "0.6"], 0),
        (["cap"], 64),
        (["cap", "nan"], 64),
        (["cap", "2"], 64),
        (["cap", "much"], 64),
        (["restore", "0.6"], 64),
        (["off"], 64),
        ([], 64),
    ],
)
def test_the_same_words_on_the_command_line(gpus: Gpus, arguments: list[str], status: int) -> None:
    process = gpus.start(*arguments)
    out, log = process.communicate(timeout=60)
    assert process.returncode == status, log
    assert b"Traceback" not in log
    if status == 0:
        assert json.loads(out)["ok"]


def test_a_test_cannot_reach_the_gpus_of_this_machine() -> None:
    argv = [*HELPER, "cap", "0.6"]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert "refused under test" in json.loads(ended.stdout)["error"]


# --- The examples in the documentation ------------------------------------------------------------------------------

Asked = Callable[[Gpus], dict[str, Any]]


@pytest.mark.parametrize("word", ["list", "cap", "restore"])
def test_the_example_has_the_shape_of_the_answer(gpus: Gpus, word: str) -> None:
    example = json.loads((ROOT / "docs" / "reference" / f"gpu-{word}.json").read_text(encoding="utf-8"))
    if word == "restore":
        gpus.ask("cap", 0.6)
    answer = gpus.ask(word, 0.6 if word == "cap" else None)
    assert shape(example) == shape(answer)


def shape(value: object) -> object:
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return shape(value[0]) if value else None
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__
