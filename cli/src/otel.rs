//! OpenTelemetry: sends the span of each request to a collector, as JSON over OTLP/HTTP.
//!
//! The standard variables apply: `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or `OTEL_EXPORTER_OTLP_ENDPOINT` (without one nothing is
//! sent), `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_EXPORTER_OTLP_TIMEOUT` (ms), `OTEL_BSP_SCHEDULE_DELAY` (ms), `OTEL_SERVICE_NAME`,
//! `OTEL_RESOURCE_ATTRIBUTES` and `OTEL_SDK_DISABLED`. Only `http://` endpoints are supported: run a collector next to the server.
//!
//! A thread sends spans in batches. If more than [`QUEUE`] spans wait, new ones are dropped, so that no request waits for the
//! collector. [`flush`] sends the last batch when the program ends. A request whose `traceparent` is not sampled sends no span.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bench::client::printable;
use serde_json::{Value, json};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

/// Greatest number of spans that wait to be sent.
const QUEUE: usize = 2048;

/// Greatest number of spans in one message.
const BATCH: usize = 512;

/// The queue of this process's spans and the time limit of [`flush`].
static EXPORT: OnceLock<(SyncSender<Message>, Duration)> = OnceLock::new();

/// Sends the waiting spans and waits for at most the collector's timeout.
pub fn flush() {
    let Some((spans, timeout)) = EXPORT.get() else { return };
    let (done, sent) = sync_channel(1);
    // If the queue is full, the collector is not keeping up, and waiting would not help.
    if spans.try_send(Message::Flush(done)).is_ok() {
        let _ = sent.recv_timeout(*timeout);
    }
}

enum Message {
    /// A span that has ended.
    Span(Value),
    /// Send all spans so far, then reply.
    Flush(SyncSender<()>),
}

/// Names of span fields in a trace: those of the semantic conventions for generative AI where they exist.
const NAMES: [(&str, &str); 10] = [
    ("id", "gen_ai.request.id"),
    ("prompt_tokens", "gen_ai.usage.input_tokens"),
    ("generation_tokens", "gen_ai.usage.output_tokens"),
    ("cached_tokens", "gen_ai.usage.cache_read.input_tokens"),
    ("finish_reason", "gen_ai.response.finish_reasons"),
    ("queue_seconds", "gen_ai.latency.time_in_queue"),
    ("prefill_seconds", "gen_ai.latency.time_in_model_prefill"),
    ("decode_seconds", "gen_ai.latency.time_in_model_decode"),
    ("first_token_seconds", "gen_ai.latency.time_to_first_token"),
    ("total_seconds", "gen_ai.latency.e2e"),
];

#[derive(Clone, Debug, PartialEq)]
pub struct Exporter {
    /// `host:port`.
    address: String,
    path: String,
    headers: Vec<(String, String)>,
    timeout: Duration,
    delay: Duration,
    resource: Vec<(String, String)>,
}

impl Exporter {
    /// Reads the environment; `Ok(None)` if no endpoint is set or the SDK is disabled.
    pub fn from_env(variable: impl Fn(&str) -> Option<String>) -> io::Result<Option<Exporter>> {
        let given = |name: &str| variable(name).filter(|value| !value.is_empty());
        if given("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true")) {
            return Ok(None);
        }
        let base =
            || given("OTEL_EXPORTER_OTLP_ENDPOINT").map(|base| format!("{}/v1/traces", base.trim_end_matches('/')));
        let Some(endpoint) = given("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT").or_else(base) else { return Ok(None) };
        let Some(rest) = endpoint.strip_prefix("http://") else {
            return Err(io::Error::other(format!(
                "the OTLP endpoint is {endpoint:?}, expected http://HOST:PORT: run a collector next to the server"
            )));
        };
        let (host, path) = rest.split_once('/').unwrap_or((rest, "v1/traces"));
        let has_port = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        let pairs = |name: &str| -> Vec<(String, String)> {
            let text = given(name).unwrap_or_default();
            let pairs = text.split(',').filter_map(|pair| pair.split_once('='));
            pairs.map(|(name, value)| (name.trim().to_string(), value.trim().to_string())).collect()
        };
        let millis = |name: &str, default: u64| {
            Duration::from_millis(given(name).and_then(|value| value.parse().ok()).unwrap_or(default))
        };
        let mut resource = pairs("OTEL_RESOURCE_ATTRIBUTES");
        if let Some(name) = given("OTEL_SERVICE_NAME") {
            resource.retain(|(key, _)| key != "service.name");
            resource.push(("service.name".to_string(), name));
        } else if !resource.iter().any(|(key, _)| key == "service.name") {
            resource.push(("service.name".to_string(), "quire".to_string()));
        }
        let headers = pairs("OTEL_EXPORTER_OTLP_HEADERS");
        let fits = |text: &str| !text.contains(['\r', '\n']);
        if !headers.iter().all(|(name, value)| fits(name) && fits(value)) {
            return Err(io::Error::other("OTEL_EXPORTER_OTLP_HEADERS contains a line break, expected name=value,..."));
        }
        Ok(Some(Exporter {
            address: if has_port { host.to_string() } else { format!("{host}:4318") },
            path: format!("/{path}"),
            headers,
            timeout: millis("OTEL_EXPORTER_OTLP_TIMEOUT", 10_000),
            delay: millis("OTEL_BSP_SCHEDULE_DELAY", 5_000),
            resource,
        }))
    }

    pub fn start(self) -> io::Result<SpanLayer> {
        let (sender, receiver) = sync_channel(QUEUE);
        let _ = EXPORT.set((sender.clone(), self.timeout));
        std::thread::Builder::new().name("quire-otel".to_string()).spawn(move || self.run(&receiver))?;
        Ok(SpanLayer { spans: sender, ids: RandomState::new() })
    }

    fn run(&self, spans: &Receiver<Message>) {
        let mut batch = Vec::new();
        let mut due = None;
        loop {
            let next = match due {
                None => spans.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(due) => spans.recv_timeout(Instant::saturating_duration_since(&due, Instant::now())),
            };
            let (flushed, is_last) = match next {
                Ok(Message::Span(span)) => {
                    batch.push(span);
                    due = due.or_else(|| Instant::now().checked_add(self.delay));
                    if batch.len() < BATCH {
                        continue;
                    }
                    (None, false)
                }
                Ok(Message::Flush(done)) => (Some(done), false),
                Err(error) => (None, error == RecvTimeoutError::Disconnected),
            };
            self.send_all(std::mem::take(&mut batch));
            due = None;
            if let Some(done) = flushed {
                let _ = done.send(());
            }
            if is_last {
                return;
            }
        }
    }

    fn send_all(&self, batch: Vec<Value>) {
        let count = batch.len();
        if count > 0
            && let Err(error) = self.send(batch)
        {
            tracing::warn!("the collector {} did not accept {count} spans: {error}", self.address);
        }
    }

    fn send(&self, spans: Vec<Value>) -> io::Result<()> {
        let attributes: Vec<Value> = self.resource.iter().map(|(key, value)| attribute(key, &json!(value))).collect();
        let scope = json!({"scope": {"name": "quire", "version": env!("CARGO_PKG_VERSION")}, "spans": spans});
        let body =
            json!({"resourceSpans": [{"resource": {"attributes": attributes}, "scopeSpans": [scope]}]}).to_string();
        let addresses: Vec<SocketAddr> = self.address.to_socket_addrs()?.collect();
        let mut stream = connect(&addresses, self.timeout)?;
        stream.set_read_timeout(Some(self.timeout))?;
        stream.set_write_timeout(Some(self.timeout))?;
        let mut head = format!("POST {} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n", self.path, self.address);
        for (name, value) in &self.headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += &format!("Content-Type: application/json\r\nContent-Length: {}\r\n\r\n", body.len());
        stream.write_all(head.as_bytes())?;
        stream.write_all(body.as_bytes())?;
        let mut status = [0; 12];
        stream.read_exact(&mut status)?;
        if status.starts_with(b"HTTP/1.1 2") || status.starts_with(b"HTTP/1.0 2") {
            return Ok(());
        }
        Err(io::Error::other(printable(&String::from_utf8_lossy(&status))))
    }
}

/// Connects to the first address that accepts: `localhost` may be `::1` and `127.0.0.1`, and a collector listen on one.
fn connect(addresses: &[SocketAddr], timeout: Duration) -> io::Result<TcpStream> {
    let each = (timeout / addresses.len().max(1) as u32).max(Duration::from_millis(1));
    let mut problem = io::Error::other("the host name has no address");
    for address in addresses {
        match TcpStream::connect_timeout(address, each) {
            Ok(stream) => return Ok(stream),
            Err(error) => problem = error,
        }
    }
    Err(problem)
}

/// Converts the spans of requests to OTLP.
pub struct SpanLayer {
    spans: SyncSender<Message>,
    ids: RandomState,
}

struct Open {
    began: SystemTime,
    fields: Fields,
}

#[derive(Default)]
struct Fields(HashMap<&'static str, Value>);

impl Visit for Fields {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.0.insert(field.name(), value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name(), value.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0.insert(field.name(), format!("{value:?}").into());
    }
}

impl<S: tracing::Subscriber + for<'a> LookupSpan<'a>> Layer<S> for SpanLayer {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        // The client that started the trace decides whether it is recorded.
        if !is_sampled(fields.0.get("traceparent")) {
            return;
        }
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(Open { began: SystemTime::now(), fields });
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        if let Some(span) = context.span(id)
            && let Some(open) = span.extensions_mut().get_mut::<Open>()
        {
            values.record(&mut open.fields);
        }
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let Some(span) = context.span(&id) else { return };
        let Some(Open { began, fields }) = span.extensions_mut().remove::<Open>() else { return };
        // Drop the span if the queue is full: requests matter more than traces.
        let _ = self.spans.try_send(Message::Span(self.finished(span.name(), began, &fields.0)));
    }
}

impl SpanLayer {
    fn finished(&self, name: &str, began: SystemTime, fields: &HashMap<&'static str, Value>) -> Value {
        let nanos = |time: SystemTime| time.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos()).to_string();
        // W3C Trace Context: 00-TRACE-PARENT-FLAGS. The server has checked the format.
        let parent = fields.get("traceparent").and_then(Value::as_str).map(|text| text.split('-').collect::<Vec<_>>());
        let fresh = |salt: u8| format!("{:016x}", self.ids.hash_one((began, Instant::now(), salt)).max(1));
        let trace = parent.as_ref().map_or_else(|| fresh(0) + &fresh(1), |parts| parts[1].to_string());
        let attributes = NAMES.iter().filter_map(|(field, key)| Some(attribute(key, fields.get(field)?)));
        let failed = fields.get("finish_reason").is_some_and(|reason| reason == "error");
        let mut span = json!({
            "traceId": trace,
            "spanId": fresh(2),
            "name": name,
            "kind": 2,
            "startTimeUnixNano": nanos(began),
            "endTimeUnixNano": nanos(SystemTime::now()),
            "attributes": attributes.collect::<Vec<_>>(),
            "status": if failed { json!({"code": 2}) } else { json!({}) },
        });
        if let Some(parts) = &parent {
            span["parentSpanId"] = parts[2].into();
        }
        span
    }
}

/// Whether the trace is recorded: the last bit of the parent's flags, true without a parent.
fn is_sampled(parent: Option<&Value>) -> bool {
    let flags = parent.and_then(Value::as_str).and_then(|text| text.rsplit('-').next());
    flags.is_none_or(|flags| u8::from_str_radix(flags, 16).is_ok_and(|flags| flags & 1 == 1))
}

fn attribute(key: &str, value: &Value) -> Value {
    let value = match value {
        Value::Number(number) if number.is_f64() => json!({"doubleValue": number}),
        Value::Number(number) => json!({"intValue": number.to_string()}),
        Value::String(text) => json!({"stringValue": text}),
        other => json!({"stringValue": other.to_string()}),
    };
    json!({"key": key, "value": value})
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn exporter(pairs: &[(&str, &str)]) -> io::Result<Option<Exporter>> {
        Exporter::from_env(|name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_string()))
    }

    #[test]
    fn the_standard_variables_apply() {
        assert_eq!(exporter(&[]).unwrap(), None);
        let base = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318/");
        assert_eq!(exporter(&[base, ("OTEL_SDK_DISABLED", "true")]).unwrap(), None);
        let found = exporter(&[base, ("OTEL_EXPORTER_OTLP_HEADERS", "a=b, c=d=e")]).unwrap().unwrap();
        assert_eq!((&found.address[..], &found.path[..]), ("collector:4318", "/v1/traces"));
        assert_eq!(found.headers, [("a".into(), "b".into()), ("c".into(), "d=e".into())]);
        let own = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://other/x");
        let found = exporter(&[base, own, ("OTEL_SERVICE_NAME", "mine")]).unwrap().unwrap();
        assert_eq!((&found.address[..], &found.path[..]), ("other:4318", "/x"));
        assert_eq!(found.resource, [("service.name".into(), "mine".into())]);
        assert!(exporter(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "https://far:443")]).is_err());
    }

    #[test]
    fn a_collector_that_listens_on_the_second_address_of_its_name_is_reached() {
        let refusing = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let second = Duration::from_secs(1);
        assert_eq!(connect(&[refusing, address], second).unwrap().peer_addr().unwrap(), address);
        assert_eq!(connect(&[refusing], second).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        assert!(connect(&[], second).unwrap_err().to_string().contains("no address"));
    }
}
