import io
from typing import Any

from swarm.demo.orchestrator import Snapshot
from swarm.demo.view import PLAIN_EVERY_S, DemoView, loss_chart, summary


def snapshot(elapsed_s: float) -> Snapshot:
    return Snapshot("training", 10, 100, 2.5, 12345.0, "4/4 hosts", 2, 3, 0.0125, elapsed_s)


def test_without_a_terminal_lines_are_plain_and_not_too_many() -> None:
    out = io.StringIO()
    with DemoView(out) as view:
        view.say("froze [host-0]")
        for i in range(10):
            view.update(snapshot(PLAIN_EVERY_S * (1 + i / 10)))
    lines = out.getvalue().splitlines()
    assert lines[0] == "froze [host-0]"
    assert len(lines) == 2
    assert "\x1b" not in out.getvalue()
    for part in ("10/100", "2.500", "12,345", "4/4 hosts", "failed calls 3", "1.25%"):
        assert part in lines[1]


def test_the_curve_falls_from_the_upper_left_to_the_lower_right() -> None:
    chart = loss_chart([(0, 5.0), (50, 3.0), (100, 1.0)], width=20, height=5, ascii_only=True).splitlines()
    assert chart[0].startswith("  5.00 |*")
    assert chart[4].startswith("  1.00 |")
    assert chart[4].rstrip().endswith("*")
    assert chart[2].count("*") == 1
    assert chart[-1].rstrip().endswith("100")
    assert all(ord(c) < 128 for c in "".join(chart))


def test_a_flat_or_missing_curve_does_not_fail() -> None:
    assert loss_chart([(0, 1.0)]) == ""
    assert "1.00" in loss_chart([(0, 1.0), (10, 1.0)])


def result(**changes: Any) -> dict[str, Any]:
    return {
        "ok": True,
        "losses": [(0, 5.5), (10, 2.5)],
        "first_loss": 5.5,
        "final_loss": 2.5,
        "final_loss_experts_masked": 3.5,
        "unigram_loss": 3.26,
        "steps": 10,
        "tokens_per_s": 1000.0,
        "failed_expert_calls": 4,
        "masked_fraction": 0.01,
        "spread_before_round": 0.1,
        "spread_after_round": 0.0,
        "resumed": {"trainer-2": 7},
        "windows": [{"fault": "kill host-3", "before": 3.0, "after": 2.6}],
        "killed": ["host-3"],
        "seconds": 90.0,
        "problems": [],
        **changes,
    }


def test_summary_tells_what_happened() -> None:
    text = summary(result())
    for part in ("5.500 -> 2.500", "kill host-3", "3.000 before, 2.600 after", "trainer-2", "survived"):
        assert part in text


def test_summary_names_the_goals_that_were_missed() -> None:
    text = summary(result(ok=False, problems=["the loss is too high"], final_loss=None))
    assert "the loss is too high" in text
    assert "not measured" in text
    assert "survived" not in text
