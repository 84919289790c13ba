//! This process's rank, the groups that it belongs to, and what all ranks must agree on.

use std::fmt::Display;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::thread::JoinHandle;

use collective::{Collective, launched, mpi, single, threads};
use siphasher::sip::SipHasher13;

use crate::api::{Backend, EngineConfig, ParallelConfig};
use crate::error::{EngineError, bad};

/// Most ranks that are threads of one process.
const MOST_THREADS: usize = 256;

/// Computes as a rank other than 0, until the group ends.
pub(crate) type Follow = fn(&EngineConfig, Arc<dyn Collective>) -> Result<(), EngineError>;

/// The ranks that compute a model together, before any of them has opened it.
pub struct Group {
    /// This rank.
    world: Arc<dyn Collective>,
    /// The other ranks, if they are threads of this process that are yet to be started.
    others: Vec<Arc<dyn Collective>>,
}

impl Group {
    /// Opens the group that a configuration asks for.
    ///
    /// # Errors
    /// The number of ranks is not that of the launcher, or the carrier cannot be opened.
    pub fn open(config: &ParallelConfig) -> Result<Group, EngineError> {
        let ranks = config.ranks();
        for (flag, size) in [
            ("--tensor-parallel-size", config.tensor_parallel_size),
            ("--pipeline-parallel-size", config.pipeline_parallel_size),
        ] {
            if size == 0 || ranks > MOST_THREADS {
                return Err(bad(flag, size, format!("1 or more, and at most {MOST_THREADS} ranks in all")));
            }
        }
        // A launcher that started one process (one Slurm task per node) is not a group.
        let by_launcher = || launched().filter(|launched| *launched > 1).map_or(Backend::Threads, |_| Backend::Mpi);
        match config.backend.unwrap_or_else(by_launcher) {
            Backend::Threads if ranks == 1 => Ok(Group { world: single(), others: Vec::new() }),
            Backend::Threads => {
                let mut ranks = threads(ranks).into_iter();
                let world = ranks.next().unwrap_or_else(single);
                Ok(Group { world, others: ranks.collect() })
            }
            Backend::Mpi => {
                let world = mpi()?;
                if world.size() == ranks {
                    return Ok(Group { world, others: Vec::new() });
                }
                let (tensor, stages) = (config.tensor_parallel_size, config.pipeline_parallel_size);
                let expected = format!("{} ranks, as many as the launcher has started", world.size());
                let error = bad("--tensor-parallel-size", format!("{tensor} (times {stages} stages)"), expected);
                together(&*world, Err(error))
            }
        }
    }

    /// This process's rank, from 0.
    pub fn rank(&self) -> usize {
        self.world.rank()
    }

    /// Tells the other ranks, if they are processes, that this one cannot start; each reports an error before it loads anything.
    pub fn refuse(&self, error: impl Display) {
        if self.others.is_empty() {
            let message = error.to_string();
            let failed: Result<(), _> = Err(EngineError::Rank { rank: self.rank(), message });
            drop(together(&*self.world, failed));
        }
    }

    pub(crate) fn into_world(self) -> Arc<dyn Collective> {
        self.world
    }

    /// Starts the ranks that are threads of this process with `follow`, and returns this one.
    pub(crate) fn enter(self, engine: &EngineConfig, follow: Follow) -> Result<Rank, EngineError> {
        let Group { world, others } = self;
        if world.rank() > 0 {
            let expected = "a command that all ranks can take part in (serve, chat, generate, bench latency, bench throughput), or threads";
            let found = format!("an engine of its own on rank {}", world.rank());
            return together(&*world, Err(bad("--distributed-executor-backend", found, expected)));
        }
        let mut started = Vec::new();
        for other in others {
            let config = EngineConfig { kv_events: None, record: None, profile: None, ..engine.clone() };
            let name = format!("quire-rank-{}", other.rank());
            let run = move || {
                let rank = other.rank();
                if let Err(error) = follow(&config, other) {
                    tracing::debug!("rank {rank}: {error}");
                }
            };
            let thread = std::thread::Builder::new().name(name).spawn(run).map_err(|error| {
                // The ranks that have started wait for this one.
                world.abort("a rank could not be started");
                bad("--tensor-parallel-size", error, "that the system can start a thread for each rank")
            });
            started.push(thread?);
        }
        Rank::new(world, &engine.parallel, started)
    }
}

/// This process's rank, with the groups that it belongs to.
pub(crate) struct Rank {
    /// All ranks.
    pub world: Arc<dyn Collective>,
    /// The ranks with the other parts of the same layers: those of one stage.
    pub tensor: Arc<dyn Collective>,
    /// The ranks with the same part of other layers, in the order of the stages.
    pub pipeline: Arc<dyn Collective>,
    /// Number of ranks on this machine.
    pub local_ranks: usize,
    /// Ranks that are threads of this process.
    pub threads: Vec<JoinHandle<()>>,
}

impl Rank {
    pub fn new(
        world: Arc<dyn Collective>,
        config: &ParallelConfig,
        threads: Vec<JoinHandle<()>>,
    ) -> Result<Rank, EngineError> {
        // A rank that cannot start says so here ([`Group::refuse`]).
        together(&*world, Ok(()))?;
        // Neighbours in rank have parts of the same layers: they exchange the most, and launchers put them on one machine.
        let size = config.tensor_parallel_size.max(1);
        let (tensor, pipeline) = match world.size() {
            1 => (world.clone(), world.clone()),
            _ => (world.split(world.rank() / size)?, world.split(world.rank() % size)?),
        };
        let machine = machine();
        let local_ranks = world.values(machine)?.into_iter().filter(|other| *other == machine).count();
        Ok(Rank { world, tensor, pipeline, local_ranks, threads })
    }

    /// The only rank of a group.
    pub fn alone() -> Rank {
        Rank { world: single(), tensor: single(), pipeline: single(), local_ranks: 1, threads: Vec::new() }
    }

    pub fn is_alone(&self) -> bool {
        self.world.size() == 1
    }

    /// Number of stages that the layers are cut into.
    pub fn stages(&self) -> usize {
        self.pipeline.size()
    }

    /// The rank whose results are those of the group: the first of the last stage.
    pub fn drawing_rank(&self) -> usize {
        (self.stages() - 1) * self.tensor.size()
    }

    /// Describes the group in one line.
    pub fn line(&self) -> String {
        let (ranks, tensor, stages) = (self.world.size(), self.tensor.size(), self.stages());
        format!("ranks: {ranks} ({}), matrices cut over {tensor}, layers over {stages}", self.world.carrier())
    }

    /// Threads of this rank, if the user does not say: its share of the machine's.
    pub fn threads_of(&self, engine: &EngineConfig) -> Option<usize> {
        let share = || {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            (cores / self.local_ranks).max(1)
        };
        engine.threads.or_else(|| (!self.is_alone()).then(share))
    }

    /// Checks that all ranks have the same program, model and settings.
    pub fn agree(&self, engine: &EngineConfig, fingerprint: u64) -> Result<(), EngineError> {
        if self.is_alone() {
            return Ok(());
        }
        if self.world.carrier() != "threads" {
            self.world.agree("hash of the program", program())?;
        }
        self.world.agree("hash of the model", fingerprint)?;
        // What may differ from machine to machine.
        let common = EngineConfig {
            model: Default::default(),
            kernels_dir: None,
            threads: None,
            kv_cache_memory_bytes: None,
            gpu_memory_utilization: None,
            swap_space_bytes: 0,
            seed: None,
            ..engine.clone()
        };
        let mut hasher = SipHasher13::new();
        postcard::to_allocvec(&common).unwrap_or_default().hash(&mut hasher);
        engine.parallel.hash(&mut hasher);
        // The part of the speculation that the memory of every rank depends on.
        let speculative = engine.speculative.as_ref();
        (engine.most_drafts(), speculative.map(|it| std::mem::discriminant(&it.method))).hash(&mut hasher);
        Ok(self.world.agree("hash of the settings", hasher.finish())?)
    }

    /// The smallest number of all ranks.
    pub fn min(&self, own: usize) -> Result<u64, EngineError> {
        Ok(self.world.min(own as u64)?)
    }
}

/// A number of this machine; the same for containers on it, which share its memory.
fn machine() -> u64 {
    let mut hasher = SipHasher13::new();
    std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default().hash(&mut hasher);
    hasher.finish()
}

/// A hash of this program's file; 0 if it cannot be read.
fn program() -> u64 {
    let read = || std::fs::read(std::env::current_exe().ok()?).ok();
    let mut hasher = SipHasher13::new();
    let Some(bytes) = read() else { return 0 };
    bytes.hash(&mut hasher);
    hasher.finish()
}

/// Returns an outcome once every rank has one. If one of them failed, all do: the first that failed with its own error, the others with
/// its message.
pub(crate) fn together<T>(world: &dyn Collective, outcome: Result<T, EngineError>) -> Result<T, EngineError> {
    if world.size() == 1 {
        return outcome;
    }
    let failed = world.values(u64::from(outcome.is_err()))?;
    let Some(first) = failed.iter().position(|failed| *failed != 0) else { return outcome };
    let message = |error: &EngineError| error.to_string().into_bytes();
    let mut bytes = outcome.as_ref().err().map(message).unwrap_or_default();
    world.broadcast(first, &mut bytes)?;
    match outcome {
        Err(error) if world.rank() == first => Err(error),
        _ => Err(EngineError::Rank { rank: first, message: String::from_utf8_lossy(&bytes).into_owned() }),
    }
}
