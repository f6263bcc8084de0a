from pathlib import Path

import pytest
import yaml

from polarlike.config import RunConfig, load_config, parse_settings, to_yaml
from polarlike.records import UsageError


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    return file


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, "samples: 3\nengine: {spec: a, thinking: true}\n")
    got = load_config(file, {"samples": 5, "engine.spec": "b", "seed": None})
    assert (got.samples, got.engine.spec, got.engine.thinking, got.seed) == (5, "b", True, 0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sampels: 3", "no setting 'sampels'; did you mean 'samples'"),
        ("engine: {spek: x}", "no setting 'engine.spek'; did you mean 'spec'"),
        ("sampling: {temprature: 1}", "no setting 'sampling.temprature'; did you mean 'temperature'"),
        ("samples: 0", "The setting 'samples' is wrong"),
        ("sandbox: 5", "The setting 'sandbox' must be a table of settings \\(kind, options\\)"),
        ("- a\n- b", "must be a table"),
        ("a: [", "not valid YAML"),
    ],
)
def test_a_wrong_config_is_one_sentence_that_names_the_key(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        load_config(write(tmp_path, text), {})
    assert "\n" not in str(caught.value)


def test_a_flag_into_a_table_that_is_none_in_the_file_names_the_table(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'engine' in .* must be a table"):
        load_config(write(tmp_path, "engine: embedded:x"), {"engine.spec": "embedded:y"})
    assert load_config(write(tmp_path, "engine:"), {"engine.spec": "embedded:y"}).engine.spec == "embedded:y"


def test_a_file_that_is_no_text_is_no_yaml(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"a: \xff")
    with pytest.raises(UsageError, match="not valid YAML"):
        load_config(tmp_path / "c.yaml", {})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Cannot read the config"):
        load_config(tmp_path / "none.yaml", {})


def test_a_config_written_to_a_run_folder_reads_back_the_same() -> None:
    config = load_config(None, {"tasks": "t", "engine.model": Path("m"), "sampling.temperature": 0.5})
    assert RunConfig.model_validate(yaml.safe_load(to_yaml(config))) == config


def test_any_setting_can_be_given_by_its_dotted_name() -> None:
    given = ["train.shuffle_rewards=true", "trainer.settings.lr=1e-3", "engine.options={threads: 2}", "out=a=b"]
    config = load_config(None, parse_settings(given))
    assert config.train.shuffle_rewards is True
    assert config.trainer.settings == {"lr": "1e-3"}  # YAML 1.1 reads it as text; the trainer takes it as a number
    assert config.engine.options == {"threads": 2}
    assert config.out == Path("a=b")


@pytest.mark.parametrize(("text", "said"), [("train.steps", "NAME=VALUE"), ("=4", "NAME=VALUE"), ("a={", "YAML")])
def test_a_setting_without_a_name_or_value_is_an_error(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_settings([text])
