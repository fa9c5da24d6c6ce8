"""Systems that run the same checkpoint, one file each; the folder is the registry. Each runs in a
process of its own.

A module here has

    TITLE      what a reader calls it
    PACKAGES   packages it needs, by the names they are imported by
    DRAFTS     whether it drafts tokens with the job's draft model: it is compared with those that
               do
    load(job)  the loaded model, a `Peer`
    unfit()    optional: why it cannot run on this machine although they are installed; None where
               it can
"""
