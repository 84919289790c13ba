// An NCCL in host code, for tests: libnccl.so.2 with the calls that collective/src/nccl makes, over the driver of driver.cpp.
//
// Ranks are threads of one process. A call waits for its stream and then for the same call of the other ranks; NCCL would enqueue it.
// These are errors: a call outside of a group's life, two ranks with one number, and ranks that call differently. Environment variables:
// FAKE_NCCL_ERROR is what ncclCommGetAsyncError reports.
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#define CALL(name, ...) extern "C" __attribute__((visibility("default"))) int name(__VA_ARGS__)

struct Stream;
extern "C" int fake_driver_finish(Stream* stream);

namespace {

enum Result { SUCCESS = 0, UNHANDLED_CUDA_ERROR = 1, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };
enum Type { BYTE = 1, FLOAT = 7 };

std::mutex lock;
std::condition_variable changed;

struct Given {
    std::string call;
    const char* from;
    size_t bytes;
};

struct Group {
    int size;
    std::set<int> joined;
    std::map<int, Given> given;
    size_t opened = 0;
    int arrived = 0;

    // Waits until all ranks have arrived.
    void meet(std::unique_lock<std::mutex>& held) {
        const size_t before = opened;
        if (++arrived == size) {
            arrived = 0;
            ++opened;
            changed.notify_all();
        }
        changed.wait(held, [&] { return opened != before; });
    }
};

struct Communicator {
    std::shared_ptr<Group> group;
    int rank;
};

struct Id {
    char bytes[128];
};

std::map<std::string, std::shared_ptr<Group>> groups;
std::set<Communicator*> alive;

// Writes to `to` what `combine` makes of what all ranks give.
template <typename Combine>
int exchange(Communicator* own, Stream* stream, const std::string& call, const void* from, char* to, size_t bytes, Combine combine) {
    if (fake_driver_finish(stream)) return UNHANDLED_CUDA_ERROR;
    std::unique_lock<std::mutex> held(lock);
    if (!alive.count(own)) return INVALID_ARGUMENT;
    Group& group = *own->group;
    group.given[own->rank] = Given{call, static_cast<const char*>(from), bytes};
    group.meet(held);
    bool same = true;
    for (const auto& [rank, given] : group.given) same = same && given.call == call && given.bytes == bytes;
    const std::vector<char> result = same ? combine(group.given) : std::vector<char>();
    // The result may replace what this rank gave, so all must have read it.
    group.meet(held);
    if (!same) return INVALID_USAGE;
    std::memcpy(to, result.data(), result.size());
    return SUCCESS;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const char* ncclGetErrorString(int code) {
    return code == INVALID_USAGE ? "invalid usage" : code == INVALID_ARGUMENT ? "invalid argument" : "unhandled cuda error";
}

extern "C" __attribute__((visibility("default"))) const char* ncclGetLastError(void*) { return "a text of\nthe library"; }

CALL(ncclGetUniqueId, Id* id) {
    const std::lock_guard<std::mutex> held(lock);
    static int count = 0;
    std::memset(id->bytes, 0x5a, sizeof id->bytes);
    std::memcpy(id->bytes, &++count, sizeof count);
    return SUCCESS;
}

CALL(ncclCommInitRank, Communicator** made, int size, Id id, int rank) {
    std::unique_lock<std::mutex> held(lock);
    std::shared_ptr<Group>& group = groups[std::string(id.bytes, sizeof id.bytes)];
    if (!group) group = std::make_shared<Group>(Group{size, {}, {}});
    if (group->size != size || rank < 0 || rank >= size || !group->joined.insert(rank).second) return INVALID_ARGUMENT;
    *made = new Communicator{group, rank};
    alive.insert(*made);
    group->meet(held);
    return SUCCESS;
}

CALL(ncclCommDestroy, Communicator* own) {
    const std::lock_guard<std::mutex> held(lock);
    if (!alive.erase(own)) return INVALID_ARGUMENT;
    delete own;
    return SUCCESS;
}

CALL(ncclCommAbort, Communicator* own) { return ncclCommDestroy(own); }

CALL(ncclCommGetAsyncError, Communicator* own, int* code) {
    const std::lock_guard<std::mutex> held(lock);
    const char* chosen = std::getenv("FAKE_NCCL_ERROR");
    *code = chosen ? std::atoi(chosen) : SUCCESS;
    return alive.count(own) ? SUCCESS : INVALID_ARGUMENT;
}

CALL(ncclGroupStart) { return SUCCESS; }
CALL(ncclGroupEnd) { return SUCCESS; }

CALL(ncclAllGather, const void* from, char* to, size_t count, int type, Communicator* own, Stream* stream) {
    if (type != BYTE) return INVALID_ARGUMENT;
    return exchange(own, stream, "all_gather", from, to, count, [](const std::map<int, Given>& given) {
        std::vector<char> all;
        for (const auto& [rank, part] : given) all.insert(all.end(), part.from, part.from + part.bytes);
        return all;
    });
}

CALL(ncclBroadcast, const void* from, char* to, size_t count, int type, int root, Communicator* own, Stream* stream) {
    if (type != BYTE) return INVALID_ARGUMENT;
    const std::string call = "broadcast of " + std::to_string(root);
    return exchange(own, stream, call, from, to, count, [=](const std::map<int, Given>& given) {
        return std::vector<char>(given.at(root).from, given.at(root).from + count);
    });
}

CALL(ncclAllReduce, const void* from, char* to, size_t count, int type, int operation, Communicator* own, Stream* stream) {
    if (type != FLOAT || operation != 0) return INVALID_ARGUMENT;
    return exchange(own, stream, "all_reduce", from, to, 4 * count, [=](const std::map<int, Given>& given) {
        std::vector<float> sums(count);
        for (const auto& [rank, part] : given)
            for (size_t i = 0; i < count; ++i) sums[i] += reinterpret_cast<const float*>(part.from)[i];
        const char* begin = reinterpret_cast<const char*>(sums.data());
        return std::vector<char>(begin, begin + 4 * count);
    });
}
