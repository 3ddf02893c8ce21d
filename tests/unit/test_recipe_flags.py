"""The recipe's flags: what they stand for, and one clear message for each mistake."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recipe_helper import criteo_fields, load_recipe, tsv

from torchrec_stream_ckpt import GlobalBatches

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


# The small recipes without any rank: their flags, their data, and one clear message for each mistake.


files = load_recipe("files")
OF_CLICKS = ("train_deepfm", "train_pnn", "train_dlrm_fsdp")
OF_RATINGS = ("train_two_tower", "train_bert4rec")
TWO_TIERS = ["--stream_ckpt", "file://near", "--stream_ckpt", "file://far"]
RECIPES = (*OF_RATINGS, *OF_CLICKS)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--restore", "latest"], "--restore needs --stream_ckpt URI"),
        (["--stream_ckpt", "ckpt"], "'ckpt' is not a known kind of log"),
        (["--stream_ckpt", "kafka://h:1/j"], "store is required with Kafka"),
        (["--batch_size", "0"], "0 is too small: pass at least 1"),
        (["--embedding_dim", "18"], "--embedding_dim 18 is not a multiple of 4"),
        (["--sharding", "grid"], "invalid choice: 'grid'"),
        (["--learning_rate", "-1"], "-1 is not above zero"),
        (["--criteo", "x"], "--criteo was removed: use --data PATH"),
        (["--ratings", "x"], "--ratings was removed: use --data PATH"),
        (["--limit_samples", "9"], "--limit_samples was removed: use --limit_train_batches N"),
        (["--data", "x", "--synthetic", "small"], "--synthetic: not allowed with argument --data"),
    ],
)
def test_a_mistake_in_a_small_recipe_prints_one_message(
    name: str, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        load_recipe(name).main(argv)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--mask", "1.5"], ["--dropout", "1"], ["--heads", "3"]])
def test_a_transformer_that_cannot_be_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_recipe("train_bert4rec").main(argv)
    *_, said, hint = capsys.readouterr().err.splitlines()
    assert argv[0] in said
    assert hint.startswith("Try: ")


@pytest.mark.parametrize("name", RECIPES)
def test_a_small_recipe_that_is_started_without_torchrun_says_how(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        load_recipe(name).main([])
    assert f"torchrun --standalone --nproc_per_node 2 recipes/{name}.py" in capsys.readouterr().err


def test_ratings_are_read_in_three_formats(tmp_path: Path) -> None:
    wanted = [[1, 7, 4.5, 100], [2, 9, 3, 50]]
    for number, text in enumerate(
        (
            "1::7::4.5::100\n2::9::3::50\n",
            "1\t7\t4.5\t100\n2\t9\t3\t50\n",
            "userId,movieId,rating,timestamp\n1,7,4.5,100\n2,9,3,50",
        )
    ):
        path = tmp_path / f"ratings-{number}"
        path.write_text(text)
        assert files.read_ratings(path).tolist() == wanted


@pytest.mark.parametrize("name", OF_RATINGS)
@pytest.mark.parametrize("line", ["1::2::3", "1::2::3::4::5", "a::2::3::4", "1::-2::3::4", "1.5::2::3::4", ""])
def test_a_bad_rating_is_told_with_its_number(name: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "ratings.dat").write_text(f"1::2::3::4\n{line}\n")
    with pytest.raises(files.UserError, match=r"ratings\.dat:2: not USER::ITEM::RATING::TIME"):
        data_of(name, "--data", str(tmp_path / "ratings.dat"))


@pytest.mark.parametrize("name", OF_CLICKS)
def test_clicks_are_read_and_a_bad_line_is_told_with_its_number(name: str, tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    fields = criteo_fields(5)
    path.write_text(tsv(fields))
    clicks = data_of(name, "--data", str(path))
    batch, order = clicks.batch(0, range(5), 5), clicks.shuffled(0)
    assert sorted(order) == list(range(5))
    for place, number in enumerate(order):
        line = fields[number]
        assert int(batch.labels[place]) == int(line[0])
        counts = np.array([int(f or 0) for f in line[1:14]], np.float64)
        assert batch.dense_features[place].tolist() == np.log(counts + 3).astype(np.float32).tolist()
        ids = [ids for (ids,) in (batch.sparse_features[key].to_dense()[place].tolist() for key in keys_of(batch))]
        assert ids == [int(f or "0", 16) % 5000 for f in line[14:]]
    for bad, fault in (
        (fields[0][:-1], "expected 40 fields, found 39"),
        (["2", *fields[0][1:]], "label '2' is neither 0 nor 1"),
        ([*fields[0][:-1], "xyz"], "C26 'xyz' is not a hash"),
        ([*fields[0][:5], "1.5", *fields[0][6:]], "I5 '1.5' is not an integer"),
    ):
        path.write_text(tsv([*fields, bad]))
        with pytest.raises(files.UserError, match=rf"train\.txt:6: {fault}"):
            data_of(name, "--data", str(path))


@pytest.mark.parametrize("name", RECIPES)
def test_a_file_that_is_not_there_or_no_text_is_told(name: str, tmp_path: Path) -> None:
    of_ratings = name in OF_RATINGS
    with pytest.raises(files.UserError, match=r"[Nn]o such file or directory"):
        data_of(name, "--data", str(tmp_path / "none"))
    with pytest.raises(files.UserError, match="Is a directory" if of_ratings else "the folder has no Criteo data"):
        data_of(name, "--data", str(tmp_path))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(files.UserError, match="not a text file" if of_ratings else "not Criteo data"):
        data_of(name, "--data", str(tmp_path / "binary"))


def data_of(name: str, *argv: str) -> Any:
    recipe = load_recipe(name)
    args: argparse.Namespace = recipe.parse_args(argv)
    if name in OF_CLICKS:
        return recipe.open_clicks(args, [args.num_embeddings] * 26)
    return (recipe.Likes if name == "train_two_tower" else recipe.Histories)(args)


def features_of(batch: Any, size: int) -> list[list[list[int]]]:
    """Ids of each sample and feature; none of what only fills up."""
    features = [batch.sparse_features[key].to_dense() for key in keys_of(batch)]
    return [[ids[at].tolist() for ids in features] for at in range(size)]


def keys_of(batch: Any) -> list[str]:
    keys: list[str] = batch.sparse_features.keys()
    return keys


@pytest.mark.parametrize("name", RECIPES)
def test_any_number_of_ranks_reads_the_same_samples(name: str) -> None:
    whole, parts = data_of(name), data_of(name)

    def batches(data: Any, rank: int, world: int) -> list[Any]:
        loader = GlobalBatches(data.batch, samples=len(data), batch_size=10, rank=rank, world=world)
        return [batch for batch, _ in zip(loader, range(3), strict=False)]

    cut = [batches(parts, rank, 3) for rank in range(3)]
    for number, one in enumerate(batches(whole, 0, 1)):
        pieces = [each[number] for each in cut]
        sizes = [3, 3, 4]
        joined = [sample for piece, size in zip(pieces, sizes, strict=True) for sample in features_of(piece, size)]
        assert joined == features_of(one, 10)
        for field in ("dense_features", "labels"):
            values = [getattr(piece, field)[:size] for piece, size in zip(pieces, sizes, strict=True)]
            assert torch.equal(torch.cat(values), getattr(one, field))
        assert [len(piece.labels) for piece in pieces] == [4, 4, 4]
        assert features_of(pieces[0], 4)[3] == [[] for _ in keys_of(one)]


def test_histories_are_in_the_order_of_time_and_of_one_user() -> None:
    histories_of = load_recipe("train_bert4rec").histories_of
    ratings = np.array([[1, 10, 5, 3], [2, 20, 5, 1], [1, 11, 5, 1], [1, 12, 5, 2], [3, 30, 5, 1], [2, 21, 5, 0]])
    assert [list(each) for each in histories_of(ratings, 20)] == [[11, 12, 10], [21, 20]]
    assert [list(each) for each in histories_of(ratings, 2)] == [[11, 12], [21, 20]]
    assert histories_of(np.empty((0, 4)), 2) == []


def test_each_history_has_a_masked_item_whose_label_is_what_was_there() -> None:
    data = data_of("train_bert4rec", "--items", "50", "--mask", "0.01")
    batch = data.batch(0, range(8), 8)
    for place, (shown,) in enumerate(features_of(batch, 8)):
        history = data.histories[data.order[place]] % 50
        labels = batch.labels[place, : len(history)].tolist()
        assert any(label >= 0 for label in labels)
        assert [label if label >= 0 else item for label, item in zip(labels, shown, strict=True)] == history.tolist()
        assert all((item == 50) == (label >= 0) for label, item in zip(labels, shown, strict=True))


def test_a_proof_needs_a_recipe_and_something_to_restore(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    resume = load_recipe("resume_resharded")
    (tmp_path / "mine.py").write_text("x = 1\n")
    for argv, message in (
        ([], "the following arguments are required: --recipe"),
        (["--recipe", "train_nothing"], "--recipe train_nothing: no such file"),
        (["--recipe", str(tmp_path / "mine.py")], "the recipe needs parse_args() and build()"),
        (["--recipe", "train_pnn"], "pass --stream_ckpt URI and --restore latest or GENERATION:MARKER"),
        (["--recipe", "train_pnn", "--stream_ckpt", "file://x", "--restore", "none"], "pass --stream_ckpt URI"),
        (["--recipe", "train_pnn", "--batch_size", "0"], "0 is too small: pass at least 1"),
        (["--recipe", "train_pnn", *TWO_TIERS], "a proof applies to one tier: pass --stream_ckpt once"),
    ):
        with pytest.raises(SystemExit) as error:
            resume.main(argv)
        assert error.value.code == 2
        assert message in capsys.readouterr().err


def test_a_proof_sees_one_bit_and_what_is_missing() -> None:
    resume = load_recipe("resume_resharded")
    held = {
        "table": {"m.embedding_bags.t.weight": torch.tensor([[0.0, 1.0]])},
        "fused": {"state.t.momentum1": torch.tensor([1.0])},
        "model": {"w": torch.tensor([float("nan")])},
        "optimizer": {},
    }
    marker = {name: value.clone() for state in held.values() for name, value in state.items()}
    marker["m.embeddings.t.weight"] = marker["m.embedding_bags.t.weight"]  # an export has both names

    def differences(marker: dict[str, torch.Tensor]) -> list[str]:
        return [line.difference for line in resume.compare(held, marker).values()]

    assert differences(marker) == ["", "", "", ""]
    assert differences({**marker, "m.embedding_bags.t.weight": torch.tensor([[-0.0, 1.0]])}) == [
        "m.embedding_bags.t.weight: differs",
        "",
        "",
        "",
    ]
    assert differences({name: value for name, value in marker.items() if name != "state.t.momentum1"}) == [
        "",
        "state.t.momentum1: not in the marker",
        "",
        "",
    ]
    assert differences({**marker, "more": torch.zeros(1)}) == ["", "", "more: only in the marker", ""]
    assert resume.compare(held, marker)["table"].values == 2
