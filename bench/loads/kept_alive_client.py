"""A client process that gets one answer after another over one kept-alive connection, for `bench overhead`.

`python -m bench.loads.kept_alive_client HOST:PORT` prints its name as JSON. For each line, a number of answers,
it prints its CPU seconds.
"""

import http.client
import json
import sys
import time

TIMEOUT_SECONDS = 60.0
PROMPT_TOKENS = 16


def main(address: str) -> None:
    """Answer each line of work."""
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_SECONDS)
    connection.connect()
    print(json.dumps({"name": "answers"}), flush=True)
    first = connection.sock
    connection.request("GET", "/v1/models")
    model = json.loads(connection.getresponse().read())["data"][0]["id"]
    for line in sys.stdin:
        used = time.process_time()
        for number in range(int(line)):
            _get_answer(connection, model, number)
        if connection.sock is not first:
            raise ConnectionError("the server has closed the connection")
        print(json.dumps({"cpu_seconds": time.process_time() - used}), flush=True)


def _get_answer(connection: http.client.HTTPConnection, model: str, number: int) -> None:
    """Post a completion of one token, and read its answer. Raises ValueError for any other answer."""
    prompt = [10 + number % 100] * PROMPT_TOKENS
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    if answer.get("usage", {}).get("completion_tokens") != 1:
        raise ValueError(f"an answer without its token: {answer}")


if __name__ == "__main__":
    main(sys.argv[1])
