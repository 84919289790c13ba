//! A batch as it is kept, and as clients see it.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::http::ApiError;
use crate::openai::responses::ComputedBy;

/// Version of [`Batch`] in the store.
const VERSION: u8 = 1;

/// A batch as it is kept.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Batch {
    pub endpoint: String,
    pub input_file_id: String,
    pub output_file_id: String,
    pub error_file_id: String,
    /// As JSON.
    pub metadata: String,
    /// Seconds for which results are kept.
    pub output_ttl: Option<u64>,
    pub computed_by: ComputedBy,
    pub expires_at: u64,
    pub status: String,
    /// When each status began.
    pub times: Vec<(String, u64)>,
    pub total: u64,
    pub completed: u64,
    pub failed: u64,
    /// Errors of the whole batch, as JSON.
    pub errors: Vec<String>,
    /// Tokens of the inputs and the outputs, at the end.
    pub tokens: (u64, u64),
}

impl Batch {
    /// Its form in the store.
    pub fn encode(&self) -> Vec<u8> {
        // Strings, numbers and lists of them always have a form.
        postcard::to_extend(self, vec![VERSION]).unwrap_or_default()
    }

    /// Reads its form in the store.
    pub fn decode(id: &str, bytes: &[u8]) -> Result<Batch, ApiError> {
        let batch = bytes.split_first().filter(|(version, _)| **version == VERSION);
        let batch = batch.and_then(|(_, bytes)| postcard::from_bytes(bytes).ok());
        batch.ok_or_else(|| ApiError::internal(format!("{id} was stored by another version of Quire")))
    }

    /// Begins a status.
    pub fn enter(&mut self, status: &str, now: u64) {
        self.status = status.to_string();
        self.times.push((status.to_string(), now));
    }

    /// The batch as OpenAI's object.
    pub fn describe(&self, id: &str, created: u64) -> Value {
        let at = |status: &str| self.times.iter().find(|(name, _)| name == status).map(|(_, at)| *at);
        let has_ended = ["completed", "expired", "cancelled"].contains(&&*self.status);
        let file = |id: &String, count: u64| (has_ended && count > 0).then(|| id.clone());
        let errors: Vec<Value> = self.errors.iter().filter_map(|error| serde_json::from_str(error).ok()).collect();
        let (input, output) = self.tokens;
        json!({
            "id": id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": (!errors.is_empty()).then(|| json!({"object": "list", "data": errors})),
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": file(&self.output_file_id, self.completed),
            "error_file_id": file(&self.error_file_id, self.failed),
            "created_at": created,
            "in_progress_at": at("in_progress"),
            "expires_at": self.expires_at,
            "finalizing_at": at("finalizing"),
            "completed_at": at("completed"),
            "failed_at": at("failed"),
            "expired_at": at("expired"),
            "cancelling_at": at("cancelling"),
            "cancelled_at": at("cancelled"),
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": {
                "input_tokens": input,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": output,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": input + output,
            },
            "metadata": serde_json::from_str::<Value>(&self.metadata).unwrap_or_default(),
        })
    }
}
