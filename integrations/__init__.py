"""The seams between dynaflow_train and the systems that host it, one folder a host."""

if __name__ != "dynaflow_train.integrations":
    raise ImportError(
        f"imported as {__name__!r}; this folder installs as 'dynaflow_train.integrations'. "
        "Import that name instead, so that each registry exists once."
    )
