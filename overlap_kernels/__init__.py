"""Kernels that a plan may put in place of a chain of ops, and the registry that finds them."""

if __name__ != "dynaflow_train.overlap_kernels":
    raise ImportError(
        f"imported as {__name__!r}; this folder installs as 'dynaflow_train.overlap_kernels'. "
        "Import that name instead, so that each registry exists once."
    )
