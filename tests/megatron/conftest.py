"""Programs that the tests start are no test modules: Megatron's needs Python 3.12."""

collect_ignore = ["pretrain.py"]
