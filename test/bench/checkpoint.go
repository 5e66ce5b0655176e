package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/tools"
)

const (
	// checkpointRounds is how often each is measured.
	checkpointRounds = 5
	// checkpointLimit is much longer than any checkpoint takes.
	checkpointLimit = time.Minute
	// togetherMiB is the memory of each container of a pod that is checkpointed as a whole.
	togetherMiB = 64
)

// checkpointMiB are the sizes of memory that a container has touched.
var checkpointMiB = []int{0, 256, 1024}

// warm is a program in Python with a long start: it imports a good part of the standard library.
const warm = `import argparse, asyncio, concurrent.futures, csv, ctypes, decimal, difflib, email, http.server, json, logging.config
import multiprocessing, pickle, pydoc, sqlite3, ssl, statistics, tarfile, time, unittest.mock, urllib.request, xml.dom.minidom, zipfile
squares = {i: str(i * i) for i in range(1000000)}
while True:
    print("line", flush=True)
    time.sleep(0.02)`

// checkpointRow measures checkpoints beside runc's own of the same container, and
// restored pods beside new ones with the same program.
func checkpointRow(ctx context.Context) (_ []table, err error) {
	criu, err := tools.Criu(ctx)
	if err != nil {
		return nil, err
	}
	s, err := newCriusOn(ctx, "runc", node.Options{Config: fmt.Sprintf("[runtime]\ncriu = %q\nrestore = true\n", criu)})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	b := &checkpoints{server: s, criu: filepath.Dir(criu)}
	var tables []table
	for _, part := range []func(context.Context) (table, error){b.containers, b.pods, b.restores} {
		t, err := part(ctx)
		if err != nil {
			return nil, err
		}
		if err := s.removeAll(ctx); err != nil {
			return nil, err
		}
		tables = append(tables, t)
	}
	return tables, nil
}

// checkpoints are a server whose containers are checkpointed.
type checkpoints struct {
	*server
	criu string // directory of the program
	made int    // directories
}

// fresh makes a directory.
func (b *checkpoints) fresh() (string, error) {
	b.made++
	dir := b.on.Path("checkpoint-" + strconv.Itoa(b.made))
	return dir, os.Mkdir(dir, 0o700)
}

// linesAfter are the arguments of a container that takes memory and then writes lines for ever.
func linesAfter(mib int) []string {
	return []string{"alloc", strconv.Itoa(mib), ";", "lines", "1000000000", "20ms"}
}

// begin runs a pod with a container, and waits until that writes lines.
func (b *checkpoints) begin(ctx context.Context, name string, c *cri.ContainerConfig) (*pod, time.Duration, error) {
	p := b.pod(name)
	began := time.Now()
	ran, err := b.runtime().RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: p.config, RuntimeHandler: b.handler})
	if err != nil {
		return nil, 0, err
	}
	p.id = ran.PodSandboxId
	if err := b.add(ctx, p, c); err != nil {
		return nil, 0, err
	}
	return p, time.Since(began), nil
}

// add starts a container in a pod, and waits until it writes lines.
func (b *checkpoints) add(ctx context.Context, p *pod, c *cri.ContainerConfig) error {
	made, err := b.runtime().CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: p.id, SandboxConfig: p.config, Config: c})
	if err != nil {
		return err
	}
	p.container = made.ContainerId
	return b.launch(ctx, p, p.container, c)
}

// launch starts a container and waits until it writes lines.
func (b *checkpoints) launch(ctx context.Context, p *pod, id string, c *cri.ContainerConfig) error {
	if _, err := b.runtime().StartContainer(ctx, &cri.StartContainerRequest{ContainerId: id}); err != nil {
		return err
	}
	log := filepath.Join(p.config.LogDirectory, c.LogPath)
	for ends := time.Now().Add(checkpointLimit); ; {
		if text, err := os.ReadFile(log); err == nil && strings.Contains(string(text), " line") {
			return nil
		}
		if err := pause(ctx, time.Millisecond); err != nil {
			return err
		}
		if time.Now().After(ends) {
			return fmt.Errorf("container %s has written nothing to %s", id, log)
		}
	}
}

// frozen returns for how many ms containers have been frozen by the server.
func (b *checkpoints) frozen(ctx context.Context) (float64, error) {
	text, err := b.metrics(ctx)
	if err != nil {
		return 0, err
	}
	seconds, err := series(text, "crius_checkpoint_frozen_seconds_sum")
	return seconds * 1e3, err
}

// taken takes a checkpoint, and returns what it took and for how long a container was frozen, in ms.
func (b *checkpoints) taken(ctx context.Context, take func() error) (took, frozen float64, err error) {
	before, err := b.frozen(ctx)
	if err != nil {
		return 0, 0, err
	}
	began := time.Now()
	if err := take(); err != nil {
		return 0, 0, err
	}
	took = time.Since(began).Seconds() * 1e3
	after, err := b.frozen(ctx)
	return took, after - before, err
}

// containers measures CheckpointContainer.
func (b *checkpoints) containers(ctx context.Context) (table, error) {
	t := table{
		title: "Checkpoint of a running container, by the memory that it has touched; runc alone checkpoints the same one",
		head:  []string{"", "crius: frozen, ms", "runc alone, ms", "frozen/runc", "CheckpointContainer, ms", "archive, MB"},
	}
	for i, mib := range checkpointMiB {
		p, _, err := b.begin(ctx, podName(i), kubelet.Container("c", images.Probe, linesAfter(mib)))
		if err != nil {
			return t, err
		}
		var froze, raw, whole []float64
		var size int64
		for range checkpointRounds {
			dir, err := b.fresh()
			if err != nil {
				return t, err
			}
			file := filepath.Join(dir, "archive.tar")
			took, frozen, err := b.taken(ctx, func() error {
				_, err := b.runtime().CheckpointContainer(ctx, &cri.CheckpointContainerRequest{ContainerId: p.container, Location: file, Timeout: int64(checkpointLimit.Seconds())})
				return err
			})
			if err != nil {
				return t, err
			}
			of, err := os.Stat(file)
			if err != nil {
				return t, err
			}
			alone, err := b.dump(ctx, p.container, filepath.Join(dir, "alone"))
			if err == nil {
				err = os.RemoveAll(dir)
			}
			if err != nil {
				return t, err
			}
			froze, raw, whole, size = append(froze, frozen), append(raw, alone), append(whole, took), of.Size()
		}
		t.add(fmt.Sprintf("%d MiB", mib), number(median(froze)), number(median(raw)), fmt.Sprintf("%.2f", median(froze)/median(raw)), number(median(whole)), number(float64(size)/1e6))
	}
	return t, nil
}

// dump has runc checkpoint a container of crius's, and returns the ms that it took. criu takes the options that
// crius has written for its last checkpoint.
func (b *checkpoints) dump(ctx context.Context, id, dir string) (float64, error) {
	found, err := filepath.Glob(filepath.Join(b.on.RunRoot(), "runtime", "*", id))
	if err != nil || len(found) != 1 {
		return 0, fmt.Errorf("state of runc of container %s: %q, %w", id, found, err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return 0, err
	}
	var took float64
	err = b.on.Do(func() error {
		cmd := exec.CommandContext(ctx, "runc", "--root", filepath.Dir(found[0]), "checkpoint", "--leave-running", "--image-path", dir, "--work-path", dir, id)
		cmd.Env = append(os.Environ(), "PATH="+b.criu+":"+os.Getenv("PATH"))
		began := time.Now()
		text, err := cmd.CombinedOutput()
		took = time.Since(began).Seconds() * 1e3
		if err != nil {
			err = fmt.Errorf("runc checkpoint: %w: %.1000s", err, text)
		}
		return err
	})
	return took, err
}

// pods measures CheckpointPod.
func (b *checkpoints) pods(ctx context.Context) (table, error) {
	t := table{
		title: fmt.Sprintf("Checkpoint of a pod whose containers have touched %d MiB each", togetherMiB),
		head:  []string{"", "each container frozen, ms", "CheckpointPod, ms", "directory, MB"},
	}
	for _, count := range []int{1, 3} {
		p, _, err := b.begin(ctx, podName(count), kubelet.Container("c0", images.Probe, linesAfter(togetherMiB)))
		if err != nil {
			return t, err
		}
		ids := []string{p.container}
		for i := 1; i < count; i++ {
			if err := b.add(ctx, p, kubelet.Container(fmt.Sprint("c", i), images.Probe, linesAfter(togetherMiB))); err != nil {
				return t, err
			}
			ids = append(ids, p.container)
		}
		var froze, whole []float64
		var size int64
		for range checkpointRounds {
			dir, err := b.fresh()
			if err != nil {
				return t, err
			}
			took, frozen, err := b.taken(ctx, func() error { return b.takePod(ctx, p.id, dir, ids) })
			if err != nil {
				return t, err
			}
			if size, err = sizeOf(dir); err == nil {
				err = os.RemoveAll(dir)
			}
			if err != nil {
				return t, err
			}
			froze, whole = append(froze, frozen/float64(count)), append(whole, took)
		}
		name := "one container"
		if count > 1 {
			name = fmt.Sprint(count, " containers")
		}
		t.add(name, number(median(froze)), number(median(whole)), number(float64(size)/1e6))
	}
	return t, nil
}

func (b *checkpoints) takePod(ctx context.Context, id, dir string, containers []string) error {
	ctx, cancel := context.WithTimeout(ctx, checkpointLimit)
	defer cancel()
	_, err := b.runtime().CheckpointPod(ctx, &cri.CheckpointPodRequest{PodSandboxId: id, OutputPath: dir, ContainerIds: containers})
	return err
}

// sizeOf returns the bytes of the files in a directory.
func sizeOf(dir string) (sum int64, err error) {
	err = filepath.WalkDir(dir, func(_ string, entry os.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		info, err := entry.Info()
		if err == nil {
			sum += info.Size()
		}
		return err
	})
	return sum, err
}

// restores measures restored pods beside new ones.
func (b *checkpoints) restores(ctx context.Context) (table, error) {
	t := table{
		title: "From the request of a pod to the first line that its program writes: new, and restored",
		head:  []string{"", "new, ms", "restored, ms", "restored/new"},
	}
	programs := []struct {
		name   string
		config func() *cri.ContainerConfig
	}{
		{"a small program", func() *cri.ContainerConfig { return kubelet.Container("c", images.Probe, linesAfter(0)) }},
		{"one that touches 1024 MiB", func() *cri.ContainerConfig { return kubelet.Container("c", images.Probe, linesAfter(1024)) }},
		{"Python with a long start", python},
	}
	for i, program := range programs {
		var cold, restored []float64
		for round := range checkpointRounds {
			fresh, took, err := b.begin(ctx, podName(100*i+round), program.config())
			if err != nil {
				return t, err
			}
			cold = append(cold, took.Seconds()*1e3)
			dir, err := b.fresh()
			if err == nil {
				err = b.takePod(ctx, fresh.id, dir, []string{fresh.container})
			}
			if err != nil {
				return t, err
			}
			if err := b.removePod(ctx, fresh.id); err != nil {
				return t, err
			}
			p := b.pod(podName(100*i + 50 + round))
			took, err = b.restore(ctx, p, dir, program.config())
			if err == nil {
				err = errors.Join(b.removePod(ctx, p.id), os.RemoveAll(dir))
			}
			if err != nil {
				return t, err
			}
			restored = append(restored, took.Seconds()*1e3)
		}
		t.add(program.name, number(median(cold)), number(median(restored)), fmt.Sprintf("%.2f", median(restored)/median(cold)))
	}
	return t, nil
}

// restore restores a pod and starts its container.
func (b *checkpoints) restore(ctx context.Context, p *pod, dir string, c *cri.ContainerConfig) (time.Duration, error) {
	limited, cancel := context.WithTimeout(ctx, checkpointLimit)
	defer cancel()
	began := time.Now()
	made, err := b.runtime().RestorePod(limited, &cri.RestorePodRequest{
		CheckpointPath: dir, RuntimeHandler: b.handler, Config: p.config, ContainerConfigs: []*cri.ContainerConfig{c},
	})
	if err != nil {
		return 0, err
	}
	p.id, p.container = made.PodSandboxId, made.RestoredContainers[0].ContainerId
	err = b.launch(ctx, p, p.container, c)
	return time.Since(began), err
}

// python is a container that runs this machine's Python. No volume is in another one: criu makes such a one writable.
func python() *cri.ContainerConfig {
	return kubelet.Container("c", images.Probe, []string{"run", "/usr/bin/python3", "-c", warm}, func(c *cri.ContainerConfig) {
		c.Envs = []*cri.KeyValue{{Key: "PYTHONHOME", Value: []byte("/")}}
		c.Mounts = []*cri.Mount{
			{ContainerPath: "/usr/bin", HostPath: "/usr/bin", Readonly: true},
			{ContainerPath: "/lib", HostPath: "/usr/lib", Readonly: true},
			{ContainerPath: "/lib64", HostPath: "/usr/lib64", Readonly: true},
		}
	})
}
