"""Load for any server of language models, and its measurement: `quire bench serve`.

`workloads` and `arrivals` define requests and their times as plain values, determined by a seed. `driver` sends the
requests through a client of `clients`, in the load processes of `processes`. `statistics` computes figures from the
records; `report` and `plots` show them.
"""
