package storage

import (
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/registry/source"
	"github.com/crius-run/crius/test/kit/image"
)

// configOf returns an image without layers, whose config has fields in addition to those that a
// config must have.
func configOf(t *testing.T, fields string) *image.Artifact {
	t.Helper()
	raw := []byte(fmt.Sprintf(`{"architecture":%q,"os":"linux","rootfs":{"type":"layers","diff_ids":[]},%s}`, runtime.GOARCH, fields))
	a := manifestOf(t, func(m map[string]any) {
		config := m["config"].(map[string]any)
		config["digest"], config["size"] = digest.FromBytes(raw).String(), len(raw)
		m["layers"] = []any{}
	})
	a.Config = digest.FromBytes(raw)
	a.Blobs = map[digest.Digest][]byte{a.Config: raw}
	return a
}

func listOf(count int, element string) string {
	return "[" + strings.Repeat(element+",", count-1) + element + "]"
}

// A config that takes much memory when it is parsed is refused before anything
// is copied, with an error that says why.
func TestCrowdedConfigsAreRefused(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r := serve(t, "app", "1", motd(t, "x"))
	for what, fields := range map[string]string{
		"history":   `"history":` + listOf(1_300_000, "{}"),
		"env":       `"config":{"Env":` + listOf(source.MaxConfigTokens, `"A=b"`) + `}`,
		"unknown":   `"x":` + listOf(1_300_000, "{}"),
		"user":      fmt.Sprintf(`"config":{"User":%q}`, strings.Repeat("u", source.MaxUser+1)),
		"any field": fmt.Sprintf(`"x":%q`, strings.Repeat("x", source.MaxConfig)),
	} {
		r.Push("app", "bad", configOf(t, fields))
		_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:bad"})
		if !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "image config: ") {
			t.Errorf("%s: %v", what, err)
		}
	}
	n.empty()
}

// What an image costs the server for as long as it is there does not grow with
// its config, and the sum over all images has a limit.
func TestImagesCostLittleMemory(t *testing.T) { // alone in the process: it measures the heap
	const count, perImage = 4, 64 << 10
	n := newNode(t)
	before := heap()
	t.Run("pull", func(t *testing.T) { // whose registry is garbage afterwards
		r := serve(t, "app", "1", motd(t, "x"))
		for i := range count {
			text := func(size int) string { return fmt.Sprintf("%q", fmt.Sprintf("%06d=", i)+strings.Repeat("v", size)) }
			r.Push("app", "1", configOf(t, fmt.Sprintf(`"history":%s,"author":%s,"config":{"Labels":{"l":%s},"Env":%s,"Cmd":[%s]}`,
				listOf(2_000, `{"created_by":"x"}`), text(100<<10), text(200<<10), listOf(2_000, text(10)), text(200<<10))))
			n.pull(r.Addr() + "/app:1")
		}
	})
	for _, when := range []string{"after the pulls", "after a restart"} {
		if images := n.list(); len(images) != count {
			t.Fatalf("%s: %d images", when, len(images))
		}
		if grown := int64(heap()) - int64(before); grown > count*perImage {
			t.Errorf("%s: %d images take %d bytes, more than %d", when, count, grown, count*perImage)
		}
		n.restart()
	}
	for _, listed := range n.list() {
		img, err := n.Image(testContext(t), listed.ID)
		if err != nil || len(img.Config.Env) != 2_000 || len(img.Config.Cmd[0]) < 200<<10 {
			t.Fatalf("%s: %v", listed.ID, err)
		}
	}
}

func heap() uint64 {
	runtime.GC()
	runtime.GC() // the first one's finalizers
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// Beyond the limit for all images configs are read when they are needed, and never mixed up.
func TestConfigsBeyondTheLimitInSum(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	for i := range 4 {
		a := configOf(t, fmt.Sprintf(`"config":{"User":"user%d","Env":["N=%d"]}`, i, i))
		n.pull(serve(t, "app", "1", a).Addr() + "/app:1")
	}
	n.images.limit = 2 * keptBytes(&imagespec.ImageConfig{User: "user0", Env: []string{"N=0"}})
	n.images.entries, n.images.stamps = nil, nil
	images := n.list()
	var kept int
	for _, listed := range images {
		kept += len(listed.Config.Env)
		found, err := n.Image(testContext(t), listed.ID)
		if err != nil || len(found.Config.Env) != 1 || found.Config.User != listed.Config.User ||
			strings.TrimPrefix(found.Config.User, "user") != strings.TrimPrefix(found.Config.Env[0], "N=") {
			t.Errorf("listed %+v, found %+v, %v", listed.Config, found, err)
		}
	}
	if len(images) != 4 || kept != 2 {
		t.Errorf("%d images, %d of them with their config", len(images), kept)
	}
}

// Verbose answers show the whole config.
func TestImageSpec(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := configOf(t, `"author":"somebody","history":[{"created_by":"x"}],"config":{"Labels":{"a":"b"},"StopSignal":"SIGUSR1"}`)
	img := n.pull(serve(t, "app", "1", a).Addr() + "/app:1")
	spec, err := n.Spec(testContext(t), img)
	if err != nil || spec.Author != "somebody" || len(spec.History) != 1 || spec.Config.Labels["a"] != "b" {
		t.Errorf("%+v, %v", spec, err)
	}
	want := imagespec.ImageConfig{StopSignal: "SIGUSR1"}
	if got, wanted := encoded(t, img.Config), encoded(t, want); got != wanted {
		t.Errorf("kept %s, want %s", got, wanted)
	}
	n.remove(img.ID)
	if _, err := n.Spec(testContext(t), img); !errors.Is(err, fault.NotFound) {
		t.Errorf("removed: %v", err)
	}
}

func encoded(t *testing.T, v any) string {
	t.Helper()
	text, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// Configs as large as real images have them are taken: buildpacks put bills of
// materials of hundreds of kilobytes into labels, and generated files have
// hundreds of instructions.
func TestLargeRealConfigsAreTaken(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := configOf(t, fmt.Sprintf(`"history":%s,"config":{"Env":%s,"Labels":{"io.buildpacks.build.metadata":%q}}`,
		listOf(1000, `{"created":"2024-01-01T00:00:00Z","created_by":"RUN x","comment":"buildkit","empty_layer":true}`),
		listOf(200, `"A=b"`), strings.Repeat("x", 2<<20)))
	img := n.pull(serve(t, "app", "1", a).Addr() + "/app:1")
	if !slices.Contains(img.Config.Env, "A=b") {
		t.Errorf("%+v", img.Config)
	}
}

// A config that is accepted is bounded, and one that is refused is the image's
// fault.
func FuzzImageConfig(f *testing.F) {
	for _, text := range []string{
		`{"architecture":"amd64","os":"linux","config":{"User":"1000:1000","Env":["A=b"]},"rootfs":{"type":"layers","diff_ids":[]}}`,
		`{"config":{"User":"` + strings.Repeat("u", source.MaxUser+1) + `"}}`, `{"config":{"user":"a","User":7}}`, listOf(50, "[{}]"), "null", "{", "",
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		err := source.CheckConfig(raw)
		if err != nil {
			if !errors.Is(err, fault.Invalid) || len(err.Error()) > 1000 {
				t.Errorf("%q: %v", raw, err)
			}
			return
		}
		var spec imagespec.Image
		if json.Unmarshal(raw, &spec) != nil {
			return
		}
		image := Image{Config: runConfig(&spec.Config)}
		if kept := image.trim(maxKeptSum); kept > maxKept || len(image.Config.User) > source.MaxUser || image.Config.User != spec.Config.User {
			t.Errorf("%q keeps %d bytes: %+v", raw, kept, image.Config)
		}
	})
}
