"""An offline job: sends the requests of a file to a service, and writes the responses to files.

Runs as a Kubernetes Job, or anywhere else. It talks to the gateway, like any client, and keeps all its state in its
output folder. A job that ends early continues there when it is started again.

One job, file by file: `__main__` -> `job` (conducts) -> `input_file` -> `request` -> `dispatcher` -> `concurrency` ->
`sending` -> `results`.

    settings      what the job is told
    job           runs one job: checks the file, reports the progress, ends with a code
    dispatcher    sends what has no result yet, and decides what becomes of each request
    input_file    fetches and checks the file with the requests, and reads its lines
    request       one line of the file. Pure
    concurrency   how many requests are in flight, and when the next one is sent. Pure
    sending       sends one request once, and tells what its response means
    results       the files with the results, which are also the job's memory
"""
