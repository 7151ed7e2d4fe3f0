"""A small hub that speaks Hugging Face's protocol as huggingface_hub uses it, over a folder. For tests and stories.

    ROOT/<organisation>/<name>/<files>      the branch `main` of a repository
    ROOT/<organisation>/<name>/.revisions/<branch or tag>/<files>      any other branch or tag

A commit's id is made from the content, so that it changes with the files. `Repository` reads the folder, `server`
answers; `python -m e2e.hub --root DIR` runs it.
"""
