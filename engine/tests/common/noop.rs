//! A device that does nothing: launches and copies succeed at once, so an engine on it takes only the time of the host. Its name is
//! `cuda-sim`, so the kernels of a GPU are chosen; every token that it "draws" is 0.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use device::{Buffer, CudaError, Device, DeviceError, Event, Launch, MemoryInfo, Pinned, Product, Queue};
use engine::{Engine, EngineConfig, GenerationParams, GenerationRequest, LoadOn, ModelSource, SamplingParams};
use simd::Pool;

pub struct NoOp {
    host: Arc<dyn Device>,
    pub launches: AtomicUsize,
    pub copies: AtomicUsize,
    /// Waits of the host for everything.
    pub synchronized: AtomicUsize,
    /// Rows of products with as many outputs as the model of the tests has tokens.
    pub vocabulary_rows: AtomicUsize,
    /// Every launch and product fails.
    pub fails: AtomicBool,
    /// The waits of the host fail too, as on a GPU that hangs.
    pub hangs: AtomicBool,
}

impl NoOp {
    pub fn new() -> Arc<NoOp> {
        NoOp::with_threads(1)
    }

    pub fn with_threads(threads: usize) -> Arc<NoOp> {
        let host = device::open("cpu", Some(threads)).unwrap();
        Arc::new(NoOp {
            host,
            launches: 0.into(),
            copies: 0.into(),
            synchronized: 0.into(),
            vocabulary_rows: 0.into(),
            fails: false.into(),
            hangs: false.into(),
        })
    }

    fn outcome(&self) -> Result<(), DeviceError> {
        self.launches.fetch_add(1, Relaxed);
        if self.fails.load(Relaxed) { Err(DeviceError::NoMatrices(self.name())) } else { self.responds() }
    }

    fn responds(&self) -> Result<(), DeviceError> {
        let error = CudaError::NotFinished(Duration::from_secs(60));
        if self.hangs.load(Relaxed) { Err(error.into()) } else { Ok(()) }
    }
}

impl Device for NoOp {
    fn name(&self) -> &'static str {
        "cuda-sim"
    }

    fn description(&self) -> String {
        "nothing".into()
    }

    fn memory(&self) -> MemoryInfo {
        self.host.memory()
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        self.host.alloc(bytes)
    }

    fn product(&self, product: Product<'_>) -> Result<(), DeviceError> {
        if product.weights.n == super::VOCABULARY {
            self.vocabulary_rows.fetch_add(product.rows, Relaxed);
        }
        self.outcome()
    }

    fn pool(&self) -> &Pool {
        self.host.pool()
    }

    fn upload(&self, _: &mut Buffer, _: usize, _: &[u8]) -> Result<(), DeviceError> {
        Ok(())
    }

    fn download(&self, _: &Buffer, _: usize, _: &mut [u8]) -> Result<(), DeviceError> {
        Ok(())
    }

    fn copy(&self, _: &Buffer, _: usize, _: &mut Buffer, _: usize, _: usize) -> Result<(), DeviceError> {
        Ok(())
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        self.synchronized.fetch_add(1, Relaxed);
        self.responds()
    }

    fn pinned(&self, bytes: usize) -> Result<Pinned, DeviceError> {
        self.host.pinned(bytes)
    }

    fn upload_async(
        &self,
        _: Queue,
        _: &Pinned,
        _: usize,
        _: &mut Buffer,
        _: usize,
        _: usize,
    ) -> Result<(), DeviceError> {
        self.copies.fetch_add(1, Relaxed);
        Ok(())
    }

    fn download_async(
        &self,
        _: Queue,
        _: &Buffer,
        _: usize,
        _: &mut Pinned,
        _: usize,
        _: usize,
    ) -> Result<(), DeviceError> {
        self.copies.fetch_add(1, Relaxed);
        Ok(())
    }

    fn record(&self, queue: Queue) -> Result<Event, DeviceError> {
        self.host.record(queue)
    }

    fn wait(&self, queue: Queue, event: &Event) -> Result<(), DeviceError> {
        self.host.wait(queue, event)
    }

    fn load(&self, _: &str) -> Result<(), DeviceError> {
        Ok(())
    }

    fn launch(&self, _: &Launch<'_>) -> Result<(), DeviceError> {
        self.outcome()
    }
}

/// An engine on this device whose `sequences` requests all decode, for at least 400 steps.
pub fn decoding(device: &Arc<NoOp>, sequences: usize) -> Engine {
    let sampling = SamplingParams { temperature: 0.7, top_p: 0.95, ..Default::default() };
    let bytes = sequences as u64 * 33 * 16 * super::TOKEN_BYTES;
    decoding_with(
        device,
        sequences,
        EngineConfig { kv_cache_memory_bytes: Some(bytes), ..Default::default() },
        sampling,
    )
}

/// The same with a cache, and a model if it is not [`super::model`], as configured.
pub fn decoding_with(device: &Arc<NoOp>, sequences: usize, config: EngineConfig, sampling: SamplingParams) -> Engine {
    let model = if config.model == ModelSource::Demo { super::model() } else { config.model.clone() };
    let config = EngineConfig {
        block_size: Some(16),
        max_num_seqs: sequences,
        max_num_batched_tokens: 16 * sequences.max(64),
        enable_prefix_caching: true,
        seed: Some(1),
        model,
        ..config
    };
    let loaded = engine::load(&config, LoadOn::Device(device.clone()), &|_, _| {}).unwrap();
    let mut engine = Engine::new(loaded.parts).unwrap();
    for which in 0..sequences as u32 {
        // Their blocks end at different steps.
        let len = 24 + which as usize % 32;
        let prompt = (0..len as u32).map(|i| 3 + (which * 131 + i * 17 + i * i * which) % 550).collect();
        let (sampling, max_tokens) = (sampling.clone(), Some(450));
        let params = GenerationParams { sampling, max_tokens, ignore_eos: true, ..Default::default() };
        engine.submit(GenerationRequest { prompt, params, ..Default::default() }).unwrap();
    }
    let mut drawn = 0;
    while drawn < 3 * sequences {
        engine.step(|_, _| drawn += 1);
    }
    engine
}
