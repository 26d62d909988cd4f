import jax
import pytest

from mtpjax import DecodeConfig
from mtpjax.cli.main import main
from mtpjax.evaluation import tune
from mtpjax.evaluation.op_cases import CASES
from pallas_kernels import dispatch, measurements
from pallas_kernels.case import difference_from_xla


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(dispatch, "_process", dispatch._Process())
    return tmp_path / "cache"


def questions_of(small, attention):
    model, params = small(attention)
    settings = {"config": DecodeConfig(num_steps=1), "batches": [1], "context": 128, "prefill_chunk": 32}
    return tune.find_questions(params, model=model, **settings)


def test_the_questions_are_those_of_plain_and_speculative_decoding_and_prefill(small):
    found = questions_of(small, "grouped")
    rows = {shape["rows"] for op, shape in found if op == "block_scaled_matmul"}
    assert rows == {32, 2}  # of prefill, of a verification; plain decoding takes two rows at least
    assert {op for op, _ in found} >= {"verify_attention", "prefill_attention", "append_heads", "gated_matmul"}
    assert len(found) == len({str(question) for question in found})


@pytest.mark.parametrize("attention", ["grouped", pytest.param("latent", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_every_question_can_be_asked_again(attention, small):
    for op, shape in questions_of(small, attention):
        run, arrays = CASES[op](shape)
        with dispatch.record_choices() as asked:
            jax.eval_shape(lambda *arrays, run=run: run(*arrays, implementation="xla"), *arrays)
        assert {**shape, "scoring": "", "queries": 0} in [
            {**found, "scoring": "", "queries": 0} for name, found in asked if name == op
        ]


@pytest.mark.slow  # the kernels' own tests compare them, too
def test_the_comparison_accepts_every_kernel(small):
    asked = {op: shape for attention in ("grouped", "latent") for op, shape in questions_of(small, attention)}
    assert len(asked) == 10
    for op, shape in asked.items():
        assert difference_from_xla(CASES[op], shape, "interpreted") <= 1, op


def test_wrong_numbers_are_not_kept(cache, small, monkeypatch):
    question = next(one for one in questions_of(small, "grouped") if one[0] == "head_top_k")
    run, arrays = CASES["head_top_k"](question[1])

    def wrong(*arrays, implementation):
        factor = 1.01 if implementation == "interpreted" else 1.0
        return jax.tree.map(lambda out: out * factor, run(*arrays, implementation="xla"))

    monkeypatch.setitem(CASES, "head_top_k", lambda shape: (wrong, arrays))
    [(_, times, failure)] = tune.measure([question], rounds=1, implementations=("xla", "interpreted"))
    assert set(times) == {"xla"} and "interpreted differs from xla" in failure


def test_measured_times_are_kept_one_by_one_and_used(cache, small, monkeypatch):
    question, other = questions_of(small, "grouped")[:2]
    found = tune.measure([question, other, ("unknown", {})], rounds=1, implementations=("xla", "interpreted"))
    measured, times, failure = next(found)
    assert (measured, set(times), failure) == (question, {"xla", "interpreted"}, None)
    assert tune.not_measured([question, other]) == [other]
    assert next(found)[0] == other
    assert next(found)[2] == "this op cannot be timed separately"
    # What is in the file decides.
    op, shape = question
    measurements.add(op, shape, {"xla": 2.0, "triton": 1.0})
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(dispatch, "_agrees", lambda *_: True)  # no GPU to compare numbers on
    assert dispatch.choose(op, "auto", ("xla", "triton"), shape) == "triton"


def test_an_implementation_that_fails_leaves_the_others(cache, small):
    [(_, times, failure)] = tune.measure(questions_of(small, "grouped")[:1], rounds=1)  # the kernel needs a GPU
    assert set(times) == {"xla"} and failure.startswith(("triton fails: ", "jax_triton fails: "))


@pytest.mark.parametrize("text", ["{", "[1]", '{"op": [{"shape": {}, "milliseconds": {"xla": "fast"}}]}', '{"op": 3}'])
def test_a_damaged_file_counts_as_empty_with_a_warning(text, cache):
    measurements.path().parent.mkdir(parents=True)
    measurements.path().write_text(text)
    with pytest.warns(UserWarning, match="is damaged and not used"):
        assert measurements.read() == {}


def test_times_are_of_one_kind_of_device(cache):
    measurements.add("op", {"rows": 1}, {"xla": 1.0})
    assert measurements.read()["op"]
    assert measurements.read("another device") == {}


def test_the_command_lists_the_shapes_and_says_that_a_cpu_has_no_kernels(cache, checkpoint, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["tune", "--model", str(checkpoint), "--dry-run", "--batch-size", "1", "--num-steps", "1"])
    output = capsys.readouterr()
    assert ended.value.code == 0
    assert "verify_attention" in output.out and "JAX has no GPU here" in output.err
    for flags in (["--context", "0"], ["--batch-size", "1", "0"]):
        with pytest.raises(SystemExit) as ended:
            main(["tune", "--model", str(checkpoint), *flags])
        assert ended.value.code and f"{flags[0]} must be at least 1, got 0" in capsys.readouterr().err
