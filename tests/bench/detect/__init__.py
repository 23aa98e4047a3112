"""The benchmark of the detector: who is named, wrongly named and missed, and how soon.

Simulated jobs with known faults go through the real wire format and the whole analysis of the
collector in virtual time: `cases` (what is run) > `job` (with `noise` and `faults`: what happens)
> `wire` (encoded batches) > `feed` (decode, engine, snapshots) > `scoring` (against the truth,
beside the rules of `baselines`) > `summary` > `report`, `plots`.
"""
