//! Work that is captured and replayed, on every backend that launches.

use device::{Arg, Buffer, Device, DeviceError, Dtype, Factor, FactorType, Launch, Product, Queue};

use super::{MODULE, add_one, contents, filled, launching};

/// A weight matrix of one number.
fn one_by_one(elements: &Buffer) -> Factor<'_> {
    Factor { elements, format: FactorType::Numbers(Dtype::F32), n: 1, k: 1 }
}

/// Computes `copy = values + 1` and `y = 2 · x + 3`, and sets the third number of `values` to -1.
fn work(device: &dyn Device, on: &mut On) -> Result<(), DeviceError> {
    add_one(device, &on.values, 1)?;
    device.copy(&on.values, 0, &mut on.copy, 0, 256)?;
    let (format, bias) = (Dtype::F32, Some(&on.bias));
    let weights = one_by_one(&on.weights);
    let columns = None;
    device.product(Product {
        x: &on.x,
        rows: 2,
        weights,
        bias,
        y: &mut on.y,
        y_format: format,
        columns,
        slices: None,
    })?;
    device.fill(&mut on.values, 8, 4, 0xff)
}

struct On {
    values: Buffer,
    copy: Buffer,
    x: Buffer,
    weights: Buffer,
    bias: Buffer,
    y: Buffer,
}

fn on(device: &dyn Device) -> On {
    let two = filled(device, &[2.0f32]);
    On {
        values: filled(device, &[0i32; 64]),
        copy: device.alloc(256).unwrap(),
        x: filled(device, &[5.0f32, 6.0]),
        weights: two,
        bias: filled(device, &[3.0f32]),
        y: device.alloc(8).unwrap(),
    }
}

fn floats(device: &dyn Device, buffer: &Buffer) -> Vec<f32> {
    contents(device, buffer).into_iter().map(|bits| f32::from_bits(bits as u32)).collect()
}

#[test]
fn a_graph_does_its_work_at_each_replay_on_what_is_there_then() {
    for device in launching() {
        let (name, device) = (device.name(), &*device);
        let mut on = on(device);
        // Run once without a capture, because nothing is loaded during a capture.
        work(device, &mut on).unwrap();
        assert_eq!(floats(device, &on.y), [13.0, 15.0], "{name}");
        let mut outcome = Ok(());
        let graph = device.capture(&mut || outcome = work(device, &mut on)).unwrap();
        outcome.unwrap();
        assert_eq!(contents(device, &on.values)[..3], [1, 1, -1], "{name}: a capture runs nothing");
        for (start, x) in [(10, 1.0f32), (20, -4.0), (30, 0.5)] {
            device.upload(&mut on.values, 0, super::bytes(&[start; 64])).unwrap();
            device.upload(&mut on.x, 0, super::bytes(&[x, 2.0 * x])).unwrap();
            device.replay(&graph).unwrap();
            // A replay is in order with later work.
            add_one(device, &on.values, 1).unwrap();
            assert_eq!(contents(device, &on.copy), [start + 1; 64], "{name}");
            assert_eq!(contents(device, &on.values)[..4], [start + 2, start + 2, 0, start + 2], "{name}");
            assert_eq!(floats(device, &on.y), [2.0 * x + 3.0, 4.0 * x + 3.0], "{name}");
        }
        for _ in 0..2 {
            device.replay(&graph).unwrap();
        }
        assert_eq!(contents(device, &on.copy)[..3], [34, 34, 0], "{name}: two in a row");
    }
}

#[test]
fn a_graph_keeps_the_memory_that_it_works_on_and_says_which_that_is() {
    for device in launching() {
        let (name, device) = (device.name(), &*device);
        let mut out = device.alloc(256).unwrap();
        let (values, other) = (filled(device, &[7i32; 64]), device.alloc(256).unwrap());
        add_one(device, &values, 1).unwrap();
        let before = device.memory().available;
        let graph = device
            .capture(&mut || {
                add_one(device, &values, 1).unwrap();
                device.copy(&values, 0, &mut out, 0, 256).unwrap();
            })
            .unwrap();
        assert!(graph.uses(&values) && graph.uses(&out) && !graph.uses(&other), "{name}");
        if super::is_fake() && name == "cuda" {
            assert_eq!((graph.device_bytes(), device.memory().available), (Some(1 << 16), before - (1 << 16)));
        }
        assert!(graph.device_bytes().is_some() == (name == "cuda"), "{name}");
        drop(values);
        let elsewhere = filled(device, &[0i32; 64]);
        device.replay(&graph).unwrap();
        device.replay(&graph).unwrap();
        assert_eq!(contents(device, &out), [10; 64], "{name}");
        assert_eq!(contents(device, &elsewhere), [0; 64], "{name}: memory that was given to another");
        drop(graph);
    }
}

#[test]
fn calls_that_cannot_be_part_of_a_graph_are_refused_and_the_capture_goes_on() {
    for device in launching() {
        let (name, device) = (device.name(), &*device);
        let values = filled(device, &[0i32; 64]);
        let (mut other, mut pinned) = (device.alloc(8).unwrap(), device.pinned(8).unwrap());
        let event = device.record(Queue::Copy).unwrap();
        add_one(device, &values, 1).unwrap();
        let empty = device.capture(&mut || {}).unwrap();
        device.replay(&empty).unwrap();
        let mut found = Vec::new();
        let graph = device
            .capture(&mut || {
                add_one(device, &values, 1).unwrap();
                found = vec![
                    device.alloc(8).map(drop),
                    device.pinned(8).map(drop),
                    device.upload(&mut other, 0, &[1; 8]),
                    device.download(&other, 0, &mut [0; 8]),
                    device.upload_async(Queue::Compute, &pinned, 0, &mut other, 0, 8),
                    device.download_async(Queue::Copy, &other, 0, &mut pinned, 0, 8),
                    device.synchronize(),
                    device.record(Queue::Compute).map(drop),
                    device.wait(Queue::Compute, &event),
                    device.capture(&mut || {}).map(drop),
                    device.replay(&empty),
                    device.load("a_module_that_is_not_open"),
                ];
                add_one(device, &values, 1).unwrap();
            })
            .unwrap();
        for (i, outcome) in found.iter().enumerate() {
            let error = outcome.as_ref().unwrap_err();
            assert!(matches!(error, DeviceError::Capturing { device, .. } if *device == name), "{name} {i}: {error}");
        }
        assert!(found[0].as_ref().unwrap_err().to_string().contains("an allocation cannot be part of a graph"));
        device.replay(&graph).unwrap();
        assert_eq!(contents(device, &values), [3; 64], "{name}");
    }
}

#[test]
fn a_capture_loads_nothing_and_one_that_panics_ends() {
    for _ in launching().filter(|device| device.name() == "cuda") {
        let fresh = device::open("cuda", Some(1)).unwrap();
        let (device, mut on) = (&*fresh, on(&*fresh));
        let mut refused = Vec::new();
        let graph = device
            .capture(&mut || {
                refused.push(add_one(device, &on.values, 1));
                refused.push(work(device, &mut on));
                let (x, weights, y) = (&on.x, &on.weights, &mut on.y);
                let weights = one_by_one(weights);
                refused.push(device.product(Product {
                    x,
                    rows: 2,
                    weights,
                    bias: None,
                    y,
                    y_format: Dtype::F32,
                    columns: None,
                    slices: None,
                }));
            })
            .unwrap();
        assert!(refused.iter().all(|outcome| matches!(outcome, Err(DeviceError::Capturing { .. }))), "{refused:?}");
        device.replay(&graph).unwrap();
        assert_eq!(contents(device, &on.values), [0; 64]);
    }
    for device in launching() {
        let device = &*device;
        let values = filled(device, &[0i32; 64]);
        add_one(device, &values, 1).unwrap();
        let panics = std::panic::AssertUnwindSafe(|| device.capture(&mut || panic!("in a capture")).map(drop));
        assert!(std::panic::catch_unwind(panics).is_err());
        add_one(device, &values, 1).unwrap();
        assert_eq!(contents(device, &values), [2; 64], "{}", device.name());
    }
}

#[test]
fn graphs_of_another_device_are_refused_and_a_cpu_has_none() {
    let cpu = device::open("cpu", Some(1)).unwrap();
    let error = cpu.capture(&mut || {}).err().unwrap().to_string();
    assert_eq!(error, "cpu: this device runs no CUDA kernels, so it has no graphs; use --device cuda or cuda-sim");
    let mut graphs: Vec<_> = launching().map(|device| (device.capture(&mut || {}).unwrap(), device)).collect();
    for device in launching() {
        for (graph, _) in &graphs {
            let error = device.replay(graph).unwrap_err();
            assert!(matches!(error, DeviceError::WrongDevice { .. }), "{error}");
            assert!(matches!(cpu.replay(graph), Err(DeviceError::NoGraphs("cpu"))));
        }
    }
    for (graph, device) in graphs.drain(..) {
        device.replay(&graph).unwrap();
    }
}

#[test]
fn a_mistake_in_a_replay_is_named_and_the_next_replay_runs() {
    for device in launching().filter(|device| device.name() == "cuda-sim") {
        let values = filled(&*device, &[1i32; 128]);
        device.load(MODULE).unwrap();
        let args = [Arg::pointer(&values, 0)];
        let (grid, block) = ([1; 3], [128, 1, 1]);
        let wrong = Launch { module: MODULE, kernel: "divergent_barrier", grid, block, shared_bytes: 0, args: &args };
        let graph = device
            .capture(&mut || {
                device.launch(&wrong).unwrap();
                add_one(&*device, &values, 2).unwrap();
            })
            .unwrap();
        for _ in 0..2 {
            let error = device.replay(&graph).unwrap_err().to_string();
            assert!(error.contains("mistakes.cu:") && error.contains("divergent barrier"), "{error}");
        }
        let good = device.capture(&mut || add_one(&*device, &values, 1).unwrap()).unwrap();
        let before = contents(&*device, &values)[0];
        device.replay(&good).unwrap();
        assert_eq!(contents(&*device, &values)[0], before + 1);
    }
}
