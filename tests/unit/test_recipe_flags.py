"""The recipe's flags: what they stand for, and one clear message for each mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recipe_helper import load_recipe

recipe = load_recipe("train_dlrm")


def test_the_default_is_the_thesis_configuration() -> None:
    args = recipe.parse_args([])
    assert args.num_embeddings_per_feature == [80_000] * 8
    assert (args.embedding_dim, args.batch_size, args.ids_per_lookup) == (64, 2048, 100)
    assert args.dense_arch_layer_sizes == [512, 512, 64]
    assert args.over_arch_layer_sizes == [1024, 1024, 1024, 1]
    assert (args.restore, args.drain_every, args.marker_every) == ("latest", 1, 100)


def test_presets_give_way_to_flags() -> None:
    args = recipe.parse_args(["--synthetic", "small", "--num_embeddings_per_feature", "10,20", "--batch_size", "6"])
    assert args.num_embeddings_per_feature == [10, 20]
    assert (args.embedding_dim, args.batch_size) == (16, 6)


def test_criteo_has_26_tables() -> None:
    args = recipe.parse_args(["--data", "x", "--num_embeddings", "500"])
    assert args.num_embeddings_per_feature == [500] * 26


STREAM = ["--stream_ckpt", "file://x"]
CRITEO = ["--data", "x"]
WRONG = [
    (["--synthetic", "netflix"], "invalid choice: 'netflix'"),
    (["--dataset", "criteo"], "--dataset was removed: use --data PATH for files, and nothing for made samples"),
    (["--criteo_path", "x"], "--criteo_path was removed: use --data PATH"),
    (["--criteo_path=x"], "--criteo_path was removed: use --data PATH"),
    (["--skip_bad_lines", "1"], "recipes.files FILE --skip_bad_lines N"),
    ([*CRITEO, "--synthetic", "small"], "--synthetic: not allowed with argument --data"),
    ([*CRITEO, "--ids_per_lookup", "3"], "--ids_per_lookup applies only to made clicks: omit it with --data"),
    ([*CRITEO, "--num_embeddings_per_feature", "1,2"], "--num_embeddings_per_feature needs 26 numbers, not 2"),
    (["--num_embeddings", "5", "--num_embeddings_per_feature", "5"], "not both"),
    (["--batch_size", "0"], "0 is too small: pass at least 1"),
    (["--batch_size", "many"], "'many' is not a whole number"),
    (["--epochs", "1.5"], "'1.5' is not a whole number"),
    (["--learning_rate", "nan"], "nan is not above zero"),
    (["--learning_rate", "fast"], "'fast' is not a number"),
    (["--num_embeddings_per_feature", "5,,5"], "'' is not a whole number"),
    (["--embedding_dim", "63"], "not a multiple of 4"),
    (["--embedding_dim", "32"], "--dense_arch_layer_sizes must end in the embedding dimension, 32, but ends in 64"),
    (["--embedding_dim", "12", "--sharding", "mixed"], "not a multiple of 8"),
    (["--over_arch_layer_sizes", "1"], "--over_arch_layer_sizes must have at least two numbers and end in 1"),
    (["--over_arch_layer_sizes", "8,2"], "and end in 1"),
    (["--optimizer", "adam"], "invalid choice: 'adam'"),
    (["--sharding", "diagonal"], "'diagonal' is not one of auto, table_wise, row_wise, column_wise, mixed"),
    (["--store", "file:///x"], "--store needs --stream_ckpt"),
    (["--restore", "latest"], "--restore needs --stream_ckpt"),
    (["--marker_every", "5"], "--marker_every needs --stream_ckpt"),
    (["--marker_every_s", "5"], "--marker_every_s needs --stream_ckpt"),
    (["--drain_every", "5"], "--drain_every needs --stream_ckpt"),
    (["--kafka_options", "x"], "--kafka_options needs --stream_ckpt"),
    (["--paranoid"], "--paranoid needs --stream_ckpt"),
    (["--stream_ckpt", "ftp://x"], "'ftp://x' is not a known kind of log"),
    (["--stream_ckpt", "ckpt"], "'ckpt' is not a known kind of log"),
    (["--stream_ckpt", "kafka://h:1/j"], "store is required with Kafka"),
    ([*STREAM, "--kafka_options", "x"], "--kafka_options needs --stream_ckpt kafka://"),
    (
        ["--stream_ckpt", "kafka://h:1/j", "--store", "y", "--kafka_options", "no.json"],
        "--kafka_options no.json: no such file",
    ),
    (["--store_options", "x"], "--store_options needs --stream_ckpt"),
    ([*STREAM, "--store_options", "x"], "--store_options needs --store s3://"),
    ([*STREAM, "--store", "s3://x", "--store_options", "no.txt"], "--store_options no.txt: no such file"),
    ([*STREAM, "--restore", "newest"], "'newest' is not latest, none or GENERATION:MARKER"),
    ([*STREAM, "--restore", "1:"], "'1:' is not latest, none or GENERATION:MARKER"),
    ([*STREAM, "--marker_every_s", "0"], "--marker_every_s: must be a number above 0 or none, got 0.0"),
]


@pytest.mark.parametrize(("argv", "message"), WRONG)
def test_a_mistake_prints_one_message_and_exits_with_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        recipe.main(argv)
    assert error.value.code == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed
    assert "usage:" not in printed


def test_a_mistake_is_one_line_and_what_to_try_said_once_on_each_node(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(2):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        with pytest.raises(SystemExit):
            recipe.parse_args(["--epochs", "0"])
    assert capsys.readouterr().err == (
        "train_dlrm.py: error: argument --epochs: 0 is too small: pass at least 1\nTry: train_dlrm.py --help\n"
    )


def test_the_oracle_is_off_unless_it_is_asked_for() -> None:
    assert [recipe.parse_args([*STREAM, *flags]).paranoid for flags in ([], ["--paranoid"])] == [False, True]


@pytest.mark.parametrize("value", ["latest", "none", "2:17"])
def test_restore_takes_a_marker_by_name(value: str) -> None:
    assert recipe.parse_args([*STREAM, "--restore", value]).restore == value


def test_started_without_torchrun_it_says_how(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        recipe.main([])
    assert "torchrun --standalone" in capsys.readouterr().err


def test_missing_data_is_found_before_any_rank_is_awaited(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(recipe, "configure_logging", lambda rank: None)
    with pytest.raises(SystemExit) as error:
        recipe.main(["--data", str(tmp_path / "no.txt")])
    assert error.value.code == 2
    assert capsys.readouterr().err == f"train_dlrm.py: error: {tmp_path / 'no.txt'}: no such file or directory\n"


def test_a_sharding_file_names_every_table(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"a": "row_wise", "b": {"table_wise": 1}, "c": {"column_wise": [1, 0]}}))
    wanted = {"a": ("row_wise", None), "b": ("table_wise", 1), "c": ("column_wise", [1, 0])}
    assert recipe.read_sharding(path, ["a", "b", "c"], 2) == wanted
    with pytest.raises(recipe.UserError, match="must name exactly the tables a, b"):
        recipe.read_sharding(path, ["a", "b"], 2)
    with pytest.raises(recipe.UserError, match=r"b: \{\"table_wise\": 1\} is not a valid sharding for 1 ranks"):
        recipe.read_sharding(path, ["a", "b", "c"], 1)


@pytest.mark.parametrize(
    "entry",
    [
        "table_wise",
        "grid",
        {"row_wise": 1, "x": 2},
        {"column_wise": []},
        {"column_wise": 1},
        3,
        None,
        {"table_wise": -1},
    ],
)
def test_a_sharding_that_makes_no_sense_is_refused(entry: object, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"a": entry}))
    with pytest.raises(recipe.UserError, match=r"a: .* is not a valid sharding for 2 ranks"):
        recipe.read_sharding(path, ["a"], 2)


def test_a_sharding_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(recipe.UserError, match=r"plan\.json: Expecting"):
        recipe.read_sharding(tmp_path / "plan.json", ["a"], 2)
    with pytest.raises(recipe.UserError, match="No such file"):
        recipe.read_sharding(tmp_path / "other.json", ["a"], 2)
