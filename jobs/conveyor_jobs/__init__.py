"""An offline job: sends the requests of a file to a service, and writes the responses to files.

Runs as a Kubernetes Job, or anywhere else. It talks to the gateway, like any client, and keeps all its state in its
output folder. A job that ends early continues there when it is started again.

One job, file by file: `__main__` -> `job` (conducts) -> `input_file` -> `request` -> `concurrency` -> `sending` ->
`results`.

    settings      what the job is told
    job           runs one job: checks the file, sends what has no result yet, reports the progress
    input_file    fetches and checks the file with the requests, and reads its lines
    request       one line of the file. Pure
    concurrency   how many requests are sent at a time. Pure
    sending       sends one request until it has a result
    results       the files with the results, which are also the job's memory
"""
