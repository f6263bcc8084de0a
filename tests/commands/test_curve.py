from pathlib import Path

from polarlike.commands.curve import draw, plot

METRICS = [
    {"kind": "eval", "step": 0, "tasks": 16, "reward": 0.3, "low": 0.2, "high": 0.45,
     "greedy_tasks": 16, "greedy_reward": 0.4, "greedy_low": 0.3, "greedy_high": 0.5},
    {"kind": "step", "step": 0, "rollouts": 96, "reward_mean": 0.33},
    {"kind": "step", "step": 1, "rollouts": 90, "reward_mean": 0.5},
    {"kind": "eval", "step": 2, "tasks": 16, "reward": 0.75, "low": 0.6, "high": 0.8},
]  # fmt: skip


def test_the_curve_shows_what_was_measured_against_the_rollouts_trained_on() -> None:
    [axes] = plot(METRICS, "a run").axes
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert lines["the step's own rollouts"] == ([0, 96], [0.33, 0.5])  # sampled before they were trained on
    sampled, greedy = (container for container in axes.containers)
    assert list(sampled.lines[0].get_xdata()) == [0, 186] and list(sampled.lines[0].get_ydata()) == [0.3, 0.75]
    [bars] = sampled.lines[2]
    assert [[round(y, 6) for _, y in bar] for bar in bars.get_segments()] == [[0.2, 0.45], [0.6, 0.8]]
    assert list(greedy.lines[0].get_xdata()) == [0]


def test_a_step_whose_line_is_missing_is_left_out() -> None:
    [axes] = plot([m for m in METRICS if (m["kind"], m["step"]) != ("step", 0)], "a run").axes
    lines = {line.get_label(): list(line.get_xdata()) for line in axes.lines}
    assert lines["the step's own rollouts"] == [0]
    assert list(axes.containers[0].lines[0].get_xdata()) == [0, 90]


def test_a_step_that_was_taken_again_counts_once() -> None:
    again = {"kind": "step", "step": 1, "rollouts": 94, "reward_mean": 0.6}
    [axes] = plot([*METRICS, again], "a run").axes
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert lines["the step's own rollouts"] == ([0, 96], [0.33, 0.6])


def test_a_step_of_a_trainer_that_reports_no_reward_counts_and_has_no_point() -> None:
    silent = [{k: v for k, v in m.items() if (k, m["step"]) != ("reward_mean", 0)} for m in METRICS]
    [axes] = plot(silent, "a run").axes
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert lines["the step's own rollouts"] == ([96], [0.5])


def test_it_is_written_as_a_png(tmp_path: Path) -> None:
    draw(METRICS, "a run", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
