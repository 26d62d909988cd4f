"""SGLang's benchmark over a real server. Its script comes from SGLang's wheel, and is not part of this repository."""

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("tokenizers")
pytest.importorskip("uvicorn")

from experiments.correctness import check_clients


@pytest.mark.slow
def test_sglangs_benchmark_completes_and_reads_our_accept_length(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    with check_clients.Server(folder).running() as server:
        try:
            check_clients.check_sglang(server, tmp_path / "sglang")
        except check_clients.Skipped as reason:
            pytest.skip(f"it cannot be installed: {reason}")
        assert server.engine.status().num_compilations == server.engine.status().num_failed == 0
