// Reads the environment variables of settings.h. A value that is unknown ends the process: a test
// that runs with another setting than the one it asked for would show nothing.
#include "settings.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace standin {
namespace {

std::string read_variable(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : otherwise;
}

[[noreturn]] void refuse_value(const char* name, const std::string& value) {
  std::fprintf(stderr, "standin: %s=%s is unknown\n", name, value.c_str());
  std::abort();
}

unsigned long long read_number(const char* name, const char* otherwise) {
  const std::string value = read_variable(name, otherwise);
  char* end = nullptr;
  const unsigned long long number = std::strtoull(value.c_str(), &end, 10);
  if (*end != '\0') {
    refuse_value(name, value);
  }
  return number;
}

int read_num_devices() {
  const int all = static_cast<int>(read_number("STANDIN_DEVICES", "1"));
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) {
    return all;
  }
  const std::string list = visible;
  const auto num_commas = std::count(list.begin(), list.end(), ',');
  return list.empty() ? 0 : std::min(all, 1 + static_cast<int>(num_commas));
}

StreamMode read_stream_mode() {
  const std::string name = read_variable("STANDIN_STREAMS", "inline");
  if (name == "inline") return StreamMode::kInline;
  if (name == "async") return StreamMode::kAsync;
  if (name == "late") return StreamMode::kLate;
  refuse_value("STANDIN_STREAMS", name);
}

bool read_skips_kernels() {
  const std::string name = read_variable("STANDIN_KERNELS", "run");
  if (name != "run" && name != "skip") {
    refuse_value("STANDIN_KERNELS", name);
  }
  return name == "skip";
}

Settings read_settings() {
  Settings result;
  result.num_devices = read_num_devices();
  result.device_bytes = read_number("STANDIN_MEMORY", "4294967296");
  result.num_multiprocessors = static_cast<int>(read_number("STANDIN_MULTIPROCESSORS", "132"));
  result.streams = read_stream_mode();
  result.delay = std::chrono::milliseconds(read_number("STANDIN_DELAY_MS", "50"));
  result.skips_kernels = read_skips_kernels();
  result.traces = read_variable("STANDIN_TRACE", "0") == "1";
  return result;
}

}  // namespace

const Settings& settings() {
  // Never destroyed: threads of streams read it until the process has ended.
  static const Settings* const value = new Settings(read_settings());
  return *value;
}

void trace(const std::string& words) {
  if (settings().traces) {
    std::fprintf(stderr, "standin: %s\n", words.c_str());
  }
}

}  // namespace standin
