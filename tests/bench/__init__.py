"""Nothing -> one table: etl beside the recipes it replaces, on the same rows, the same machine, in the same run.

    corpus ─→ JSON lines in files and on a loopback S3 server
    agreement ─→ ids equal, masks equal after the named rules, before anything is timed
    ours, rivals ─→ one program a measurement, a process of its own, watched by `gauge`
    __main__ ─→ rounds in turn, medians, ratios within a round

`python -m tests.bench --help`, or `make bench`.
"""
