"""Load for any server of language models, and measurements of it: `quire bench serve`.

`workloads` and `arrivals` say what is asked and when, as plain values that follow from a seed; `driver` asks, through a
client of `clients`, in load processes of `processes`; `statistics` makes figures of the records, `report` and `plots`
show them.
"""
