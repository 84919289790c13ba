//! `quire run-batch`: a file of requests through the readers of the routes, without HTTP.

use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::path::Path;
use std::sync::Arc;

use engine::EngineConfig;
use server::{App, ServerOptions, local};

use super::command::RunBatchArgs;
use super::error::CliError;
use super::{note, session};

pub fn run(args: &RunBatchArgs, mut config: EngineConfig) -> Result<(), CliError> {
    // Before minutes of loading.
    let mut input = input(&args.input_file)?;
    let mut output = output(&args.output_file)?;
    args.engine.fetch(&mut config)?;
    let source = config.model.clone();
    let runtime = session::runtime()?;
    let engine = session::start(config)?;
    note(session::describe(&engine, &source));
    let served_model_names = args.served_model_name.clone();
    let app = Arc::new(App::new(engine.clone(), ServerOptions { served_model_names, ..ServerOptions::default() }));
    let counts = runtime.block_on(async {
        tokio::spawn(engine.wake_readers());
        local::run_batch(&app, &mut input, &mut output, |_| {}).await
    })?;
    note(format_args!("{} requests completed, {} failed", counts.completed, counts.failed));
    Ok(())
}

fn problem(flag: &'static str, path: &Path, error: &io::Error) -> CliError {
    CliError::File { flag, path: path.to_owned(), message: error.to_string() }
}

fn input(path: &Path) -> Result<Box<dyn BufRead>, CliError> {
    if path == Path::new("-") {
        return Ok(Box::new(io::stdin().lock()));
    }
    let file = File::open(path).map_err(|error| problem("--input-file", path, &error))?;
    Ok(Box::new(BufReader::new(file)))
}

fn output(path: &Path) -> Result<Box<dyn Write>, CliError> {
    if path == Path::new("-") {
        return Ok(Box::new(io::stdout()));
    }
    let file = File::create(path).map_err(|error| problem("--output-file", path, &error))?;
    Ok(Box::new(BufWriter::new(file)))
}
