//! What the host does for a step on `cuda-sim`: the products that it plans.

use std::sync::{Arc, Mutex};

use crate::common::{files, last_logits, needs};
use crate::support::hooked::{Hooked, Hooks};
use attention_kernels::{Dtype, KernelChoice, KvCache, Needs, select};
use device::gemm::Product;
use device::{Device, DeviceError, Matrix, Options};
use models::{Model, ModelConfig, StepLimits, Weights};

const LIMITS: StepLimits = StepLimits { max_rows: 64, max_seqs: 4, max_model_len: 256, block_size: 16, num_blocks: 64 };

/// What a device was asked for.
#[derive(Default)]
struct Calls {
    planned: Vec<(Kind, usize)>,
    products: Vec<(Kind, usize)>,
}

/// Outputs, inputs, bias and result type of a product.
type Kind = (usize, usize, bool, Dtype);

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Calls>>);

impl Hooks for Log {
    fn before_plan(&self, weights: &Matrix, max_rows: usize, bias: bool, y_format: Dtype) {
        self.0.lock().unwrap().planned.push(((weights.n(), weights.k(), bias, y_format), max_rows));
    }
    fn product(&self, device: &dyn Device, product: Product<'_>) -> Result<(), DeviceError> {
        let Product { weights, rows, bias, y_format, .. } = product;
        let kind = (weights.n(), weights.k(), bias.is_some(), y_format);
        self.0.lock().unwrap().products.push((kind, rows));
        device.product(product)
    }
}

fn load(case: &str, dtype: Dtype) -> Option<(Model, Vec<KvCache>, Log)> {
    let kernels = Some(testkit::kernels::host::folder_for_tests()?);
    let options = Options { threads: Some(1), kernels, ..Options::default() };
    let log = Log::default();
    let device = Hooked { device: device::open_with("cuda-sim", &options).unwrap(), hooks: log.clone() };
    let device: Arc<dyn Device> = Arc::new(device);
    let files = files(case);
    let decoder = ModelConfig::load(&files).unwrap().decoder;
    let needs = Needs { dtype, ..needs(&*device, &decoder) };
    let (set, weights) = (select(&KernelChoice::default(), &needs).unwrap(), Weights::open(&files).unwrap());
    let mut model = Model::load(&decoder, &weights, device, set, LIMITS.max_rows, &|_, _| Ok(())).unwrap();
    model.use_graphs(LIMITS.max_seqs);
    model.reserve(&LIMITS).unwrap();
    let caches = model.new_cache(LIMITS.num_blocks, LIMITS.block_size).unwrap();
    Some((model, caches, log))
}

#[test]
fn every_product_of_a_step_was_planned_for_its_number_of_rows() {
    for (case, dtype) in [("qwen2", Dtype::F32), ("qwen3-moe", Dtype::F16), ("deepseek-v2-lite", Dtype::Bf16)] {
        let Some((mut model, mut caches, log)) = load(case, dtype) else { return };
        model.warm_up(&mut caches).unwrap();
        let planned = std::mem::take(&mut log.0.lock().unwrap().planned);
        last_logits(&mut model, &mut caches, (LIMITS.block_size, LIMITS.num_blocks), &[5; 60], 33);
        last_logits(&mut model, &mut caches, (LIMITS.block_size, LIMITS.num_blocks), &[6], 1);
        let calls = log.0.lock().unwrap();
        assert!(calls.planned.is_empty(), "{case}: planned in a step");
        for (kind, rows) in &calls.products {
            let found = planned.iter().any(|(of, max_rows)| of == kind && max_rows >= rows);
            assert!(found, "{case}: {kind:?} with {rows} rows");
        }
        let rows = |wanted| calls.products.iter().any(|(_, rows)| *rows == wanted);
        assert!(rows(1) && rows(33) && rows(64), "{case}: nothing to show");
    }
}
