"""`dynaflow bench`: whole steps of strategies and baselines, interleaved, compared fairly."""
