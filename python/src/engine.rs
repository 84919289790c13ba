//! The engine.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cli::embed::{Purpose, Setup, SetupError};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyDict};
use server::App;
use server::local::{self, Route, Run};

use crate::answer::bytes;
use crate::stream::Stream;
use crate::wait::{Owned, block_on, lock, on_thread, return_memory};
use crate::{EngineDeadError, exception};

/// Time that the end of an engine may take.
const END_TIME: Duration = Duration::from_secs(5);

/// Number of bodies that are read between two looks for signals.
const BODIES: usize = 16;

/// A model that is loaded, and the thread that computes it.
#[pyclass(frozen, module = "quire._quire")]
pub struct Engine {
    /// `None` once it is closed.
    app: Owned<Mutex<Option<Arc<Held>>>>,
}

/// The engine ends when the last user lets go of it.
struct Held {
    app: Arc<App>,
    engine: engine::AsyncEngine,
}

impl Engine {
    fn held(&self) -> PyResult<Arc<Held>> {
        let held = lock(self.app.get()?).clone();
        held.ok_or_else(|| EngineDeadError::new_err("found a closed engine, expected a running one; start another"))
    }
}

#[pymethods]
impl Engine {
    /// Loads a model with these settings, a JSON object, and starts the engine.
    #[new]
    fn new(py: Python<'_>, settings: &str) -> PyResult<Engine> {
        let setup = Setup::read(parsed(settings)?, Purpose::Engine).map_err(setup_exception)?;
        return_memory();
        let held = on_thread(py, "quire-load", move || {
            let (engine, options) = setup.start()?;
            let app = Arc::new(App::new(engine.clone(), local::options(options)));
            Ok(Arc::new(Held { app, engine }))
        })?;
        Ok(Engine { app: Owned::new(Mutex::new(Some(held.map_err(setup_exception)?))) })
    }

    /// Facts about the model.
    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let held = self.held()?;
        let (info, facts) = (held.engine.info(), PyDict::new(py));
        facts.set_item("name", &info.name)?;
        facts.set_item("architecture", &info.architecture)?;
        facts.set_item("num_parameters", info.num_parameters)?;
        facts.set_item("max_model_len", info.max_model_len)?;
        facts.set_item("vocab_size", info.vocab_size)?;
        facts.set_item("eos_token_ids", &info.eos_token_ids)?;
        facts.set_item("block_size", info.block_size)?;
        facts.set_item("num_blocks", info.num_blocks)?;
        facts.set_item("max_loras", info.max_loras)?;
        facts.set_item("has_chat_template", held.engine.chat_template().is_some())?;
        facts.set_item("notes", &info.notes)?;
        Ok(facts)
    }

    /// Sampling defaults of `generation_config.json`: those that it has, by the names of request fields.
    fn sampling_defaults<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let held = self.held()?;
        let (known, all) = (held.engine.generation_defaults(), PyDict::new(py));
        let numbers = [
            ("temperature", known.temperature),
            ("top_p", known.top_p),
            ("min_p", known.min_p),
            ("repetition_penalty", known.repetition_penalty),
        ];
        for (name, value) in numbers {
            if let Some(value) = value {
                // The shortest decimal: 0.7 and not 0.699999988079071.
                all.set_item(name, value.to_string().parse::<f64>().unwrap_or(value.into()))?;
            }
        }
        if let Some(top_k) = known.top_k {
            all.set_item("top_k", top_k)?;
        }
        if let Some(max_tokens) = known.max_new_tokens {
            all.set_item("max_tokens", max_tokens)?;
        }
        Ok(all)
    }

    /// Submits requests together: one body in JSON for each, of the route "completions", "chat", "embeddings" or "classify". With `whole`, the
    /// stream returns each when it has ended. If one is refused, none runs.
    fn submit(&self, py: Python<'_>, route: &str, bodies: Vec<PyBackedBytes>, whole: bool) -> PyResult<Stream> {
        let held = self.held()?;
        let route = match route {
            "completions" => Route::Completions,
            "chat" => Route::Chat,
            "embeddings" => Route::Embeddings,
            "classify" => Route::Classify,
            _ => return Err(PyValueError::new_err("route: expected completions, chat, embeddings or classify")),
        };
        let mut requests = Vec::with_capacity(bodies.len());
        for some in bodies.chunks(BODIES) {
            let read = || some.iter().map(|body| local::prepare(&held.app, route, body)).collect::<Result<Vec<_>, _>>();
            requests.extend(py.detach(read).map_err(|error| exception(&error))?);
            py.check_signals()?;
        }
        let prompts = requests.iter().map(|request| request.prompt.clone()).collect();
        let sequences: Vec<usize> = requests.iter().map(|request| request.params.n).collect();
        let run = block_on(py, Run::submit(&held.app, requests))?.map_err(|error| exception(&error))?;
        Ok(Stream::new(run, prompts, &sequences, whole))
    }

    /// What a route returns of a vector of an answer, both as float32: its first elements, the scores of logits.
    fn finish(
        &self,
        py: Python<'_>,
        vector: PyBackedBytes,
        dimensions: Option<usize>,
        use_activation: Option<bool>,
    ) -> PyResult<Py<PyBytes>> {
        let held = self.held()?;
        let vector = vector.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect();
        let finished = local::finish(&held.app, vector, dimensions, use_activation);
        Ok(bytes(py, finished.into_iter().map(f32::to_ne_bytes)))
    }

    /// Runs a body of `/score` to its end. Returns the token ids of each pair, as uint32, and its score.
    fn score(&self, py: Python<'_>, body: PyBackedBytes) -> PyResult<Vec<(Py<PyBytes>, f32)>> {
        let held = self.held()?;
        let found = block_on(py, local::score(&held.app, &body))?.map_err(|error| exception(&error))?;
        Ok(found.into_iter().map(|(ids, score)| (bytes(py, ids.into_iter().map(u32::to_ne_bytes)), score)).collect())
    }

    /// Token ids of a text, as uint32.
    fn encode(&self, py: Python<'_>, text: &str, add_special_tokens: bool) -> PyResult<Py<PyBytes>> {
        let held = self.held()?;
        let ids = py.detach(|| held.engine.tokenizer().encode(text, add_special_tokens)).map_err(value_error)?;
        Ok(bytes(py, ids.iter().map(|id| id.to_ne_bytes())))
    }

    /// Text of token ids.
    fn decode(&self, py: Python<'_>, token_ids: Vec<u32>, skip_special_tokens: bool) -> PyResult<String> {
        let held = self.held()?;
        py.detach(|| held.engine.tokenizer().decode(&token_ids, skip_special_tokens)).map_err(value_error)
    }

    /// Text of each of these tokens alone; bytes that are not UTF-8 are U+FFFD.
    fn token_texts(&self, token_ids: Vec<u32>) -> PyResult<Vec<String>> {
        let held = self.held()?;
        let text = |id| String::from_utf8_lossy(&held.engine.tokenizer().token_bytes(id)).into_owned();
        Ok(token_ids.into_iter().map(text).collect())
    }

    /// The token of an id as the vocabulary spells it; `None` if the vocabulary has no such id.
    fn id_to_token(&self, token_id: u32) -> PyResult<Option<String>> {
        Ok(self.held()?.engine.tokenizer().id_to_token(token_id))
    }

    /// The id of a token as the vocabulary spells it.
    fn token_to_id(&self, token: &str) -> PyResult<Option<u32>> {
        Ok(self.held()?.engine.tokenizer().token_to_id(token))
    }

    /// Whether a token is special: it marks structure and is no text.
    fn is_special(&self, token_id: u32) -> PyResult<bool> {
        Ok(self.held()?.engine.tokenizer().is_special(token_id))
    }

    /// The prompt of a body of the route "chat", as text.
    fn render(&self, py: Python<'_>, body: PyBackedBytes) -> PyResult<String> {
        let held = self.held()?;
        py.detach(|| local::render(&held.app, &body)).map_err(|error| exception(&error))
    }

    /// Reads a LoRA adapter, and gives it a name for the field `model` of requests.
    fn load_adapter(&self, py: Python<'_>, name: &str, path: PathBuf, replace: bool) -> PyResult<()> {
        let held = self.held()?;
        block_on(py, held.engine.load_adapter(name, path, replace))?.map_err(value_error)
    }

    /// Removes a LoRA adapter after its last request.
    fn unload_adapter(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        let held = self.held()?;
        block_on(py, held.engine.unload_adapter(name))?.map_err(value_error)
    }

    /// Names and folders of the LoRA adapters.
    fn adapters(&self) -> PyResult<Vec<(String, PathBuf)>> {
        Ok(self.held()?.engine.adapters().into_iter().map(|adapter| (adapter.name, adapter.path)).collect())
    }

    /// Empties the prefix cache. Returns whether it did.
    fn reset_prefix_cache(&self, py: Python<'_>, reset_running: bool) -> PyResult<bool> {
        let held = self.held()?;
        let done = block_on(py, held.engine.reset_prefix_cache(reset_running))?;
        done.ok_or_else(|| EngineDeadError::new_err("the engine has ended; start another"))
    }

    /// Gives the cache back, and at level 2 the weights too. `mode` says what becomes of unfinished requests: "abort", "wait" or "keep".
    fn sleep(&self, py: Python<'_>, level: i64, mode: &str) -> PyResult<()> {
        let held = self.held()?;
        block_on(py, local::sleep(&held.app, level, mode))?.map_err(|error| exception(&error))
    }

    /// Takes the memory again.
    fn wake_up(&self, py: Python<'_>) -> PyResult<()> {
        let held = self.held()?;
        block_on(py, local::wake_up(&held.app))?.map_err(|error| exception(&error))
    }

    /// Whether it sleeps.
    fn is_sleeping(&self) -> PyResult<bool> {
        Ok(self.held()?.engine.sleeping().is_some())
    }

    /// Metrics in Prometheus' text format.
    fn metrics(&self, py: Python<'_>) -> PyResult<String> {
        let held = self.held()?;
        Ok(py.detach(|| local::metrics(&held.app)))
    }

    /// Number of requests that have not ended.
    fn num_unfinished(&self) -> PyResult<usize> {
        Ok(self.held()?.engine.num_unfinished())
    }

    /// Whether the engine takes requests.
    fn is_running(&self) -> PyResult<bool> {
        let held = lock(self.app.get()?).clone();
        Ok(held.is_some_and(|held| held.engine.is_alive() && !held.engine.is_draining()))
    }

    /// Cancels all requests, ends the engine and frees its memory. A second call does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let app = self.app.get()?;
        py.detach(|| {
            let held = lock(app).take();
            if let Some(held) = held {
                held.engine.end(END_TIME);
                drop(held);
                engine::allocator::trim();
            }
        });
        Ok(())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.engine.shutdown();
    }
}

/// The settings in a JSON object.
pub fn parsed(settings: &str) -> PyResult<toml::Table> {
    serde_json::from_str(settings).map_err(|error| PyValueError::new_err(format!("settings: {error}")))
}

/// The exception of a start that failed.
pub fn setup_exception(error: SetupError) -> PyErr {
    match error {
        SetupError::Setting(line) => PyValueError::new_err(line),
        SetupError::Failed(line) => PyRuntimeError::new_err(line),
    }
}

fn value_error(error: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}
