// The cache of graphs. While operators repeat a known graph, one comparison each is all that happens; from the first
// that differs on, operators are kept with their lines, to be told apart from the nearest known graph.

#include "accounting.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "lines.h"

namespace gaudi_sim {
namespace {

struct Step {
  uint64_t key;
  uint32_t form;  // index of its text
  uint32_t line;
};

struct Graph {
  std::string tag;
  std::vector<Step> steps;
};

std::atomic<bool> in_step{false};
std::atomic<bool> strict{false};
std::atomic<bool> eager{false};
std::atomic<int> compiled_depth{0};

std::mutex mutex;
Counts totals;
std::vector<Event> happened;
std::vector<Graph> known;
std::unordered_map<uint64_t, size_t> whole;     // hash of all operators of a graph -> its index in `known`
std::unordered_map<uint64_t, size_t> prefixes;  // hash of its first operators -> one graph that begins so
std::vector<Form> form_list;
std::unordered_map<uint64_t, uint32_t> forms;

// The graph that is being collected. It repeats `known[like]` until `own` begins to be filled.
struct Current {
  uint64_t hash = 0;
  size_t operators = 0;
  std::optional<size_t> like;
  bool is_new = false;
  std::vector<Step> own;
};
Current current;
uint64_t serial = 1;  // of the current graph, so that a block knows whether its number is of this one
uint32_t tensors = 0;

double wall_clock() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

bool repeats(uint64_t key) {
  const uint64_t hash = Signature::mixed(current.hash, key);
  if (!current.is_new) {
    const bool as_before = current.like && current.operators < known[*current.like].steps.size() &&
        known[*current.like].steps[current.operators].key == key;
    if (!as_before) {
      const auto found = prefixes.find(hash);
      if (found == prefixes.end()) {
        current.is_new = true;
        current.own.clear();
        if (current.like) {
          const auto& steps = known[*current.like].steps;
          current.own.assign(steps.begin(), steps.begin() + static_cast<std::ptrdiff_t>(current.operators));
        }
        return false;
      }
      current.like = found->second;
    }
    current.hash = hash;
    ++current.operators;
    return true;
  }
  return false;
}

void begin_graph() {
  current.hash = 0;
  current.operators = 0;
  current.like.reset();
  current.is_new = false;
  current.own.clear();
  ++serial;
  tensors = 0;
}

size_t common(const std::vector<Step>& one, const std::vector<Step>& other) {
  size_t same = 0;
  while (same < std::min(one.size(), other.size()) && one[same].key == other[same].key) {
    ++same;
  }
  return same;
}

// The known graph with the longest beginning in common, of the same tag where there is one.
const Graph* nearest(const std::string& tag, const std::vector<Step>& steps) {
  const Graph* best = nullptr;
  std::pair<bool, size_t> rank;
  for (const auto& graph : known) {
    const std::pair<bool, size_t> candidate(graph.tag == tag, common(graph.steps, steps));
    if (best == nullptr || candidate > rank) {
      best = &graph;
      rank = candidate;
    }
  }
  return best;
}

std::string described(const Step& step) {
  return form_list[step.form].name + form_list[step.form].operands + " at " + line_text(step.line);
}

// How `steps` differ from the nearest known graph, and the line of the first operator that does.
std::pair<std::string, uint32_t> difference(const std::string& tag, const std::vector<Step>& steps) {
  const Graph* graph = nearest(tag, steps);
  if (graph == nullptr || graph->tag != tag) {
    return {"the first graph of this boundary", steps.front().line};
  }
  const size_t place = common(graph->steps, steps);
  const std::string which = "operator " + std::to_string(place + 1);
  if (place == steps.size()) {
    const Step& next = graph->steps[place];
    return {
        "ends after " + std::to_string(place) + " operators, where the nearest known graph goes on with " +
            described(next),
        next.line};
  }
  const Step& now = steps[place];
  if (place == graph->steps.size()) {
    return {which + " is " + described(now) + ", where the nearest known graph ends", now.line};
  }
  const Step& before = graph->steps[place];
  if (now.form == before.form && now.line == before.line) {
    return {which + " is " + described(now) + " as before, but takes other tensors", now.line};
  }
  const std::string where = now.line == before.line ? " at the same place" : " at " + line_text(before.line);
  const Form& form = form_list[before.form];
  const std::string was = form.name == form_list[now.form].name ? form.operands : " " + form.name + form.operands;
  return {which + " is " + described(now) + ", was" + was + where, now.line};
}

void end_graph_locked(const std::string& tag) {
  const auto operators = static_cast<int64_t>(current.operators);
  if (operators == 0) {
    begin_graph();
    return;
  }
  ++totals.graphs;
  if (!current.is_new && whole.count(current.hash) != 0) {
    ++totals.hits;
    begin_graph();
    return;
  }
  ++totals.compilations;
  std::vector<Step> steps = current.is_new
      ? std::move(current.own)
      : std::vector<Step>(
            known[*current.like].steps.begin(),
            known[*current.like].steps.begin() + static_cast<std::ptrdiff_t>(current.operators));
  auto [text, line] = difference(tag, steps);
  happened.push_back({"compilation", tag, line_text(line), operators, std::move(text), wall_clock(), in_step});
  uint64_t hash = 0;
  for (const auto& step : steps) {
    hash = Signature::mixed(hash, step.key);
    prefixes.emplace(hash, known.size());
  }
  whole.emplace(hash, known.size());
  known.push_back({tag, std::move(steps)});
  begin_graph();
}

// The number of a tensor's bytes in the current graph.
uint32_t number_of(const at::Tensor& tensor) {
  Block& block = block_of(tensor.storage().unsafeGetStorageImpl());
  if (block.graph != serial) {
    block.graph = serial;
    block.id = ++tensors;
  }
  return block.id;
}

}  // namespace

void Signature::add(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  const auto sizes = impl->sizes();
  const auto strides = impl->strides();
  uint64_t form = mixed(form_, static_cast<uint64_t>(tensor.scalar_type()) * 64 + sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    form = mixed(form, static_cast<uint64_t>(sizes[i]));
    form = mixed(form, static_cast<uint64_t>(strides[i]));
  }
  form_ = mixed(form, static_cast<uint64_t>(impl->storage_offset()));
  tensors_ = mixed(tensors_, on_device(tensor) ? number_of(tensor) : 0);
}

void add_result(const at::Tensor& tensor) {
  number_of(tensor);
}

void add_operator(const Signature& signature, const std::function<Form()>& describe) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    ++totals.operators;
    if (eager) {
      totals.single += compiled_depth == 0;
      return;
    }
    if (repeats(signature.key())) {
      return;
    }
  }
  const uint32_t line = current_line();  // takes the GIL, so not under the lock
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [form, added] = forms.emplace(signature.form(), static_cast<uint32_t>(form_list.size()));
  if (added) {
    form_list.push_back(describe());
  }
  current.own.push_back({signature.key(), form->second, line});
  ++current.operators;
}

void enter_step(bool is_strict) {
  in_step = true;
  strict = is_strict;
}

void leave_step() {
  in_step = false;
  strict = false;
}

bool is_in_step() {
  return in_step;
}

bool is_strict() {
  return strict;
}

void end_graph(const std::string& tag) {
  const std::lock_guard<std::mutex> lock(mutex);
  end_graph_locked(tag);
}

void set_eager() {
  eager = true;
}

void compiled(const std::string& tag, const std::string& line, int64_t operators, const std::string& difference) {
  const std::lock_guard<std::mutex> lock(mutex);
  ++totals.compilations;
  happened.push_back({"compilation", tag, line, operators, difference, wall_clock(), in_step});
}

void enter_compiled() {
  const std::lock_guard<std::mutex> lock(mutex);
  ++totals.graphs;
  ++compiled_depth;
}

void leave_compiled() {
  --compiled_depth;
}

void host_read(const std::string& what, uint32_t line) {
  const std::lock_guard<std::mutex> lock(mutex);
  ++totals.breaks;
  happened.push_back(
      {"break",
       "host read",
       line_text(line),
       static_cast<int64_t>(current.operators),
       what + " reads values on the host",
       wall_clock(),
       in_step});
  end_graph_locked("host read");
}

bool operators_wait() {
  const std::lock_guard<std::mutex> lock(mutex);
  return current.operators != 0;
}

void replayed(int64_t operators) {
  const std::lock_guard<std::mutex> lock(mutex);
  end_graph_locked("before replay");
  ++totals.graphs;
  ++totals.hits;
  totals.operators += operators;
}

void count_mixed() {
  const std::lock_guard<std::mutex> lock(mutex);
  ++totals.mixed;
}

Counts counts() {
  const std::lock_guard<std::mutex> lock(mutex);
  return totals;
}

std::vector<Event> events() {
  const std::lock_guard<std::mutex> lock(mutex);
  return happened;
}

void reset_accounts() {
  const std::lock_guard<std::mutex> lock(mutex);
  totals = {};
  happened.clear();
  known.clear();
  whole.clear();
  prefixes.clear();
  begin_graph();
}

}  // namespace gaudi_sim
