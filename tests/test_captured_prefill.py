"""Invariant: graphs of a prefill that are made once serve every batch, whatever its images, and give eager's rows."""

import torch
from captured_prefill import check


def test_graphs_made_once_serve_batches_with_other_images() -> None:
    graphs = check(torch.device("cpu"))
    report = graphs.report()
    assert report.misses == {}
    assert report.hits == 16
