//! Which variants are selected, and the errors of choices that are impossible.

use attention_kernels::{
    AttentionBatch, CacheFormat, Dtype, KernelChoice, KvDtype, Layout, Needs, Operation, SelectError, Variant, select,
    variants,
};
use linear::Arithmetic;
use simd::Isa;

fn cpu(head_dim: usize) -> Needs {
    Needs { head_dim, window: true, ..Needs::default() }
}

fn cuda(dtype: Dtype, kv_dtype: KvDtype) -> Needs {
    Needs { device: "cuda-sim".into(), dtype, kv_dtype, ..cpu(128) }
}

fn chosen(choice: &KernelChoice, needs: &Needs) -> [&'static str; 4] {
    let set = select(choice, needs).unwrap();
    [set.decode.name, set.prefill.name, set.cache_write.name, set.block_copy.name]
}

fn format(choice: &KernelChoice, needs: &Needs) -> Result<CacheFormat, SelectError> {
    select(choice, needs).map(|set| set.format)
}

#[test]
fn an_error_says_why_a_variant_cannot_serve_and_which_can() {
    let choice = KernelChoice { prefill: "cpu.portable".into(), ..Default::default() };
    let error = select(&choice, &Needs { dtype: Dtype::F16, ..cpu(64) }).err().unwrap().to_string();
    assert!(error.contains("no decode kernel") && error.contains("cpu.reference: it computes in f32"), "{error}");
    let error = select(&choice, &Needs { device: "abacus".into(), ..cpu(64) }).err().unwrap().to_string();
    assert!(error.contains("no decode kernel") && error.contains("abacus"), "{error}");
    let choice = KernelChoice { prefill: "cuda.generic".into(), ..Default::default() };
    let needs = cuda(Dtype::F32, KvDtype::F16);
    let message = format(&choice, &needs).err().unwrap().to_string();
    assert!(message.contains("cache holds same,fp8_e4m3,fp8_e5m2,int8,int8_per_token_head, not f16"), "{message}");
    let choice = KernelChoice { decode: "cuda.paged_v1".into(), ..Default::default() };
    let message = format(&choice, &cuda(Dtype::F32, KvDtype::Same)).err().unwrap().to_string();
    assert!(message.contains("cannot serve: it computes in f16,bf16"), "{message}");
    assert!(message.ends_with("use one of: cuda.generic"), "{message}");
}

#[test]
fn a_product_that_takes_only_numbers_is_refused_for_weights_in_fewer_bits() {
    let needs = Needs { codes: true, ..cuda(Dtype::Bf16, KvDtype::Same) };
    assert_eq!(select(&KernelChoice::default(), &needs).unwrap().linear.name, "cuda.linear");
    let choice = KernelChoice { linear: "cuda.product".into(), ..Default::default() };
    let message = select(&choice, &needs).err().unwrap().to_string();
    assert!(
        message.ends_with("it takes no weights in 8 or 4 bits; use one of: cuda.linear, cuda.grouped_experts"),
        "{message}"
    );
    assert_eq!(select(&choice, &Needs { codes: false, ..needs }).unwrap().linear.name, "cuda.product");
}

#[test]
fn auto_selects_the_highest_rank_that_can_serve() {
    let auto = KernelChoice::default();
    let best = |rounds| {
        let serves = |v: &&Variant| v.capabilities.runs_on("cpu") && v.capabilities.arithmetic.rounds() == rounds;
        variants(Operation::Decode).into_iter().find(serves).unwrap().name
    };
    for kv_dtype in KvDtype::ALL {
        let selected = |arithmetic| select(&auto, &Needs { kv_dtype, arithmetic, ..cpu(1024) }).unwrap();
        assert_eq!(selected(Dtype::F32).decode.name, best(false));
        // Only a cache of bfloat16 is multiplied in pairs.
        assert_eq!(selected(Dtype::Bf16).decode.name, best(kv_dtype == KvDtype::Bf16));
    }
}

#[test]
fn nothing_rounds_for_a_model_that_computes_in_float32() {
    let choice = KernelChoice { decode: "cpu.portable_bf16".into(), ..Default::default() };
    let needs = Needs { kv_dtype: KvDtype::Bf16, ..cpu(1024) };
    let message = select(&choice, &needs).err().unwrap().to_string();
    assert!(
        message.contains("cannot serve: it rounds to bf16, the model computes in f32; use one of: cpu."),
        "{message}"
    );
    let set = select(&choice, &Needs { arithmetic: Dtype::Bf16, ..needs }).unwrap();
    assert!(set.prefill.name.ends_with("_bf16") && set.arithmetic.rounds());
}

#[test]
fn products_and_attention_on_tiles_are_selected_where_the_unit_exists_or_by_name() {
    let needs = Needs { kv_dtype: KvDtype::Bf16, arithmetic: Dtype::Bf16, ..cpu(1024) };
    let named = |linear: &str| KernelChoice { linear: linear.into(), ..Default::default() };
    let (auto, amx) = (select(&KernelChoice::default(), &needs).unwrap(), select(&named("cpu.amx_bf16"), &needs));
    match Isa::Amx.missing() {
        _ if cfg!(not(target_arch = "x86_64")) => {}
        None => {
            assert_eq!((auto.linear.name, amx.unwrap().arithmetic), ("cpu.amx_bf16", Arithmetic::Tiles));
            assert_eq!([auto.decode.name, auto.prefill.name], ["cpu.amx_bf16"; 2]);
        }
        Some(why) => {
            let message = amx.err().unwrap().to_string();
            let begin = format!("[kernels] linear = \"cpu.amx_bf16\" cannot serve: {why}; use one of: cpu.");
            assert!(message.starts_with(&begin) && !message.contains('\n'), "{message}");
            assert_eq!(auto.arithmetic, Arithmetic::Pairs);
        }
    }
    assert_eq!(select(&named("cpu.portable_tiles"), &needs).unwrap().arithmetic, Arithmetic::Tiles);
    let pairs = select(&named("cpu.portable"), &needs).unwrap();
    let families = [pairs.decode, pairs.prefill].map(|variant| variant.capabilities.arithmetic);
    assert_eq!((pairs.arithmetic, families), (Arithmetic::Pairs, [Arithmetic::Pairs; 2]));
    // A name decides, and the other operation of attention follows it.
    let choice = KernelChoice { decode: "cpu.portable_tiles".into(), ..named("cpu.portable") };
    let mixed = select(&choice, &Needs { row_invariant: true, ..needs.clone() }).unwrap();
    assert_eq!(mixed.prefill.capabilities.arithmetic, Arithmetic::Tiles);
    let exact = Needs { arithmetic: Dtype::F32, ..needs };
    assert_eq!(select(&KernelChoice::default(), &exact).unwrap().arithmetic, Arithmetic::Exact);
    let message = select(&named("cpu.portable_tiles"), &exact).err().unwrap().to_string();
    assert!(message.contains("cannot serve: it rounds to bf16, the model computes in f32"), "{message}");
}

#[test]
fn a_cache_is_in_pairs_if_they_are_multiplied_and_all_vectors_are_whole() {
    let pairs = Needs { kv_dtype: KvDtype::Bf16, arithmetic: Dtype::Bf16, ..cpu(1024) };
    let layout = |needs: &Needs| select(&KernelChoice::default(), needs).unwrap().format.layout;
    assert_eq!(layout(&pairs), Layout::Pairs);
    for in_rows in [
        Needs { arithmetic: Dtype::F32, ..pairs.clone() },
        Needs { kv_dtype: KvDtype::Same, ..pairs.clone() },
        Needs { block_size: 8, ..pairs.clone() },
        Needs { head_dim: 20, ..pairs.clone() },
        Needs { other_head_dim: Some(24), ..pairs.clone() },
        Needs { latent: Some(48), ..pairs.clone() },
    ] {
        assert_eq!(layout(&in_rows), Layout::Hnd, "{in_rows:?}");
    }
    // A variant that reads rows only has its cache in rows.
    let choice = KernelChoice { decode: "cpu.portable".into(), ..KernelChoice::default() };
    assert_eq!(select(&choice, &pairs).unwrap().format.layout, Layout::Hnd);
}

#[test]
fn a_gpu_set_agrees_on_types_and_layout() {
    let auto = KernelChoice::default();
    assert_eq!(format(&auto, &cuda(Dtype::Bf16, KvDtype::Int8)).unwrap().to_string(), "bf16, cache int8, HND");
    let halves = ["cuda.paged_gqa", "cuda.paged_prefill", "cuda.fused", "cuda.copy_blocks"];
    assert_eq!(chosen(&auto, &cuda(Dtype::F16, KvDtype::Same)), halves);
    assert_eq!(
        format(&auto, &cuda(Dtype::F16, KvDtype::Int8PerToken)).unwrap().to_string(),
        "f16, cache int8_per_token_head, HND"
    );
    let singles = ["cuda.generic", "cuda.generic", "cuda.fused", "cuda.copy_blocks"];
    assert_eq!(chosen(&auto, &cuda(Dtype::F32, KvDtype::Fp8E5m2)), singles);
    let old = Needs { compute_capability: Some((7, 5)), ..cuda(Dtype::F16, KvDtype::Same) };
    let error = format(&auto, &old).err().unwrap().to_string();
    assert!(error.contains("needs compute capability 8.0, this GPU has 7.5"), "{error}");
}

#[test]
fn a_chunk_of_few_rows_is_decoded_where_a_kernel_groups_them() {
    let (grouped, auto) = (cuda(Dtype::F16, KvDtype::Same), KernelChoice::default());
    let by_rows = KernelChoice { decode: "cuda.paged_v2".into(), ..Default::default() };
    let batch = AttentionBatch { query_starts: vec![0, 1, 3, 19, 36, 37], ..AttentionBatch::default() };
    assert_eq!(select(&auto, &grouped).unwrap().decodes(&batch), 3, "1, 2 and 16 rows, not 17");
    assert_eq!(select(&by_rows, &grouped).unwrap().decodes(&batch), 1);
    assert_eq!(select(&auto, &cpu(64)).unwrap().decodes(&batch), 1);
    assert_eq!(select(&auto, &grouped).unwrap().decodes(&AttentionBatch::default()), 0);
}

#[test]
fn the_hopper_kernel_is_selected_on_hopper_for_what_it_supports() {
    let on = |capability| Needs { compute_capability: Some(capability), ..cuda(Dtype::Bf16, KvDtype::Same) };
    let auto = |needs: &Needs| chosen(&KernelChoice::default(), needs)[1];
    assert_eq!(auto(&on((9, 0))), "cuda.prefill_sm90");
    assert_eq!(auto(&cuda(Dtype::Bf16, KvDtype::Same)), "cuda.paged_prefill", "the simulator stands for any GPU");
    let named = KernelChoice { prefill: "cuda.prefill_sm90".into(), ..Default::default() };
    assert_eq!(chosen(&named, &on((9, 0)))[1], "cuda.prefill_sm90");
    for (needs, why) in [
        (on((8, 9)), "needs compute capability exactly 9.0, this GPU has 8.9"),
        (on((10, 0)), "needs compute capability exactly 9.0, this GPU has 10.0"),
        (Needs { head_dim: 96, ..on((9, 0)) }, "its head sizes are 64,128, the model's is 96"),
        (Needs { block_size: 24, ..on((9, 0)) }, "its block sizes are 8,16,32,64,128, --block-size is 24"),
        (Needs { row_invariant: true, ..on((9, 0)) }, "it is not row-invariant"),
    ] {
        assert_ne!(auto(&needs), "cuda.prefill_sm90", "{why}");
        let error = format(&named, &needs).err().unwrap().to_string();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn blocks_that_are_not_whole_vectors_are_refused_at_selection() {
    let odd = Needs { head_dim: 8, block_size: 5, ..cuda(Dtype::F32, KvDtype::Int8) };
    let error = format(&KernelChoice::default(), &odd).err().unwrap().to_string();
    assert!(error.contains("no block_copy kernel") && error.contains("it moves 16 bytes at a time"), "{error}");
    assert!(error.contains("a head's block has 40; make --block-size a multiple of 16"), "{error}");
    assert!(format(&KernelChoice::default(), &Needs { block_size: 16, ..odd }).is_ok());
}

#[test]
fn an_unknown_name_is_an_error_that_lists_the_known_ones() {
    let choice = KernelChoice { decode: "cpu.fast".into(), ..Default::default() };
    let error = select(&choice, &cpu(64)).err().unwrap().to_string();
    assert!(error.starts_with("[kernels] decode = \"cpu.fast\": there is no such variant; use one of: "), "{error}");
    assert!(error.contains("cpu.reference") && error.contains("cuda.paged_v1"), "{error}");
}

#[test]
fn a_row_invariant_set_takes_decode_and_prefill_from_one_family() {
    let needs = Needs { row_invariant: true, ..cuda(Dtype::F16, KvDtype::Same) };
    assert_eq!(chosen(&KernelChoice::default(), &needs)[..2], ["cuda.paged_gqa", "cuda.paged_prefill"]);
    let pinned = KernelChoice { decode: "cuda.paged_v1".into(), ..Default::default() };
    let error = format(&pinned, &needs).err().unwrap().to_string();
    assert!(error.contains("one family") && error.contains("cuda.paged_v1 (HND,NHD)"), "{error}");
    assert_eq!(chosen(&pinned, &Needs { row_invariant: false, ..needs })[0], "cuda.paged_v1");
    let set = select(&KernelChoice::default(), &Needs { row_invariant: true, ..cpu(64) }).unwrap();
    assert_eq!(set.decode.name, set.prefill.name);
}

#[test]
fn every_head_size_of_published_models_and_every_option_is_served_in_every_type() {
    let extras = Needs { window: true, soft_cap: true, alibi: true, sinks: true, lse: true, ..Needs::default() };
    for head_dim in [16, 32, 48, 64, 80, 96, 112, 120, 128, 160, 192, 256, 512] {
        for block_size in [16, 48, 2048, 4096] {
            for row_invariant in [false, true] {
                let needs = Needs { head_dim, block_size, row_invariant, ..extras.clone() };
                for dtype in Dtype::ALL {
                    let on_gpu = Needs { device: "cuda-sim".into(), dtype, ..needs.clone() };
                    select(&KernelChoice::default(), &on_gpu).unwrap();
                }
                for kv_dtype in KvDtype::ALL {
                    select(&KernelChoice::default(), &Needs { kv_dtype, ..needs.clone() }).unwrap();
                }
            }
        }
    }
}
