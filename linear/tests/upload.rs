//! Uploads of checkpoint numbers.

use device::{Buffer, Device, Dtype};
use half::{bf16, f16};
use linear::Uploader;

use crate::backends::{Fake, devices, is_fake};

/// Size of a staging buffer.
const STAGE: usize = 16 << 20;

fn numbers(device: &dyn Device, buffer: &Buffer) -> Vec<f32> {
    let mut bytes = vec![0; buffer.len_bytes()];
    device.download(buffer, 0, &mut bytes).unwrap();
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

#[test]
fn numbers_arrive_over_a_driver_of_host_code_too() {
    if is_fake() {
        return;
    }
    let Some(fake) = Fake::get() else { return };
    let output = fake.run("upload::parts", &[], &[]);
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed") && !said.contains("NOT RUN"), "{said}");
}

#[test]
fn parts_longer_than_a_stage_arrive_in_order_and_converted() {
    let long: Vec<u8> = (0..STAGE / 4 + 5).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let short = f16::from_f32(2.5).to_le_bytes();
    let parts = [(Dtype::F32, &long[..]), (Dtype::F16, &short[..])];
    for device in devices() {
        let buffer = Uploader::new(&*device).unwrap().numbers(Dtype::F32, &parts).unwrap();
        let found = numbers(&*device, &buffer);
        assert!(found.iter().enumerate().take(STAGE / 4 + 5).all(|(i, x)| *x == i as f32), "{}", device.name());
        assert_eq!(found[STAGE / 4 + 5..], [2.5]);
    }
}

#[test]
fn numbers_of_any_type_are_converted_to_the_nearest_of_any_other() {
    let store = |format, values: &[f32]| -> Vec<u8> {
        match format {
            Dtype::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Dtype::Bf16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
            Dtype::F16 => values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
        }
    };
    // More numbers than are converted at a time; all of them have at most 8 bits, so that each type holds them exactly.
    let exact: Vec<f32> = (0..1000).map(|i| (i % 251) as f32 / 16.0 - 7.0).collect();
    let device = device::open("cpu", Some(1)).unwrap();
    let mut uploader = Uploader::new(&*device).unwrap();
    for (from, to) in Dtype::ALL.into_iter().flat_map(|a| Dtype::ALL.map(|b| (a, b))) {
        let buffer = uploader.numbers(to, &[(from, &store(from, &exact))]).unwrap();
        assert!(buffer.host::<u8>().unwrap() == store(to, &exact), "{from} {to}");
    }
    let rounded = [0.1f32, -3.3, 65504.0, 1e-7, 1e9];
    for to in Dtype::ALL {
        let buffer = uploader.numbers(to, &[(Dtype::F32, &store(Dtype::F32, &rounded))]).unwrap();
        assert!(buffer.host::<u8>().unwrap() == store(to, &rounded), "{to}");
    }
}
