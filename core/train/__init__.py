"""Training: from a recipe to a finished run.

Each module imports only what stands above it:

    toml, identity                  values as text; what identifies a run
    compiling                       the modes of torch.compile
    schedule                        weights and options of terms that change with the step
    config, problems                the tables of a recipe; pydantic's errors in words
    finetuning                      what of a pre-trained network learns
    embedder                        vectors of inputs of one's own, and files of them
    card, onnx_file, publish        what exported folders share: model card, ONNX, the Hub
    adapter                         what a domain provides
    domains, shipped                domains and shipped files by name
    data_sets                       published data sets, as the domains declare them
    recipe                          read, merge, check
    state_file                      values and arrays in one file that needs no pickle
    optimizer, metrics, sampling,   parts of a run
    checkpoint, model_files,
    notes, signals, encoding,
    block_losses, evaluation,
    other_ranks, best
    run_folder                      where a run lies, and how it is found
    trackers                        where the lines of metrics go: metrics.jsonl, TensorBoard, wandb, MLflow, trackio
    build, launch                   model and objective; device and processes
    run_state                       what changes while a run trains: continue it, put it on record
    bookkeeping                     what happens between steps: log, evaluate, save
    step, nonfinite                 one forward pass; where a number that is not finite comes from
    loop                            `train` and the loop itself
    trained_run                     a finished run, loaded back
    theory                          the papers' theorems on one
    objective_callback              an objective in somebody else's trainer: its steps and parameters
    compute_loss                    an objective as the loss of transformers' Trainer
"""
