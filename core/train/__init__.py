"""Training: from a recipe to a finished run.

Each module imports only what stands above it:

    toml, identity                  values as text; what identifies a run
    schedule                        weights and options of terms that change with the step
    config, problems                the tables of a recipe; pydantic's errors in words
    finetuning                      what of a pre-trained network learns
    adapter                         what a domain provides
    domains, shipped                domains and shipped files by name
    recipe                          read, merge, check
    optimizer, metrics, sampling,   parts of a run
    checkpoint, model_files,
    notes, signals, encoding,
    block_losses, evaluation
    run_folder                      where a run lies, and how it is found
    build, launch                   model and objective; device and processes
    run_state                       what changes while a run trains: continue it, put it on record
    bookkeeping                     what happens between steps: log, evaluate, save
    step, nonfinite                 one forward pass; where a number that is not finite comes from
    loop                            `train` and the loop itself
    trained_run                     a finished run, loaded back
    theory                          the papers' theorems on one
"""
