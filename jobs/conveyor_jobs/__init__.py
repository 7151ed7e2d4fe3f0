"""An offline job: sends the requests of a file to a service, and writes the responses to files.

Runs as a Kubernetes Job, or anywhere else. It talks to the gateway, like any client, and keeps all its state in its
output folder. A job that ends early continues there when it is started again.

One job, file by file: `__main__` -> `job` (conducts) -> `input_file` -> `request` -> `dispatcher` -> `concurrency` ->
`sending` -> `results`.

    settings      flags and environment variables
    job           runs one job: checks the file, reports the progress, ends with a code
    dispatcher    sends each request without a result, and records, retries or fails it
    input_file    fetches and checks the file with the requests, and reads its lines
    request       one line of the file. Pure
    concurrency   how many requests are in flight, and when the next one is sent. Pure
    sending       sends one request once, and classifies its response
    results       the files with the results, which are also the job's memory
"""
