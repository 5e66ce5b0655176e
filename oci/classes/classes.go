// Package classes puts containers into classes of block I/O and of Intel RDT
// (cache and memory bandwidth). Files of goresctrl define the classes. A
// container's classes are named by annotations, the same as in CRI-O and
// containerd:
//
//	blockio.resources.beta.kubernetes.io/pod                  of the pod, for all containers
//	blockio.resources.beta.kubernetes.io/container.NAME       of the pod, for one
//	io.kubernetes.cri.blockio-class                           of the container
//
// and the same with rdt; or by NRI plugins.
//
// Errors wrap fault.Invalid, fault.Precondition if a plugin names a class and
// none are configured, or fault.Unavailable if the node has no RDT.
package classes

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/intel/goresctrl/pkg/blockio"
	"github.com/intel/goresctrl/pkg/kubernetes"
	"github.com/intel/goresctrl/pkg/rdt"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"sigs.k8s.io/yaml"

	"github.com/crius-run/crius/internal/fault"
)

// Config names the files of classes; empty: none.
type Config struct {
	BlockIOFile string
	RDTFile     string
}

// Container holds what determines the classes of a container.
type Container struct {
	Name                        string
	Annotations, PodAnnotations map[string]string
}

// Classes are those of a node. A program has only one: goresctrl keeps them in
// global variables.
type Classes struct {
	cfg     Config
	blockIO atomic.Pointer[string] // the file of classes

	mu     sync.Mutex // for goresctrl's variables
	rdtErr error      // why this node has no RDT; nil: it has
}

// New checks the files.
func New(cfg Config) (*Classes, error) {
	c := &Classes{cfg: cfg}
	if err := c.CheckBlockIO(cfg.BlockIOFile); err != nil {
		return nil, err
	}
	c.UseBlockIO(cfg.BlockIOFile)
	if cfg.RDTFile != "" {
		if err := parseRDT(cfg.RDTFile); err != nil {
			return nil, fmt.Errorf("runtime.rdt_config_file %s: %w: %w", cfg.RDTFile, err, fault.Invalid)
		}
	}
	return c, nil
}

// parseRDT checks a file as far as possible without the processor, as strictly
// as goresctrl will.
func parseRDT(path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	return yaml.UnmarshalStrict(text, &rdt.Config{})
}

// CheckBlockIO says what is wrong with a file of classes of block I/O, which may be empty.
func (c *Classes) CheckBlockIO(path string) error {
	if path == "" {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return readBlockIO(path)
}

// UseBlockIO makes path the file of classes of block I/O; empty: there are none.
func (c *Classes) UseBlockIO(path string) { c.blockIO.Store(&path) }

func readBlockIO(path string) error {
	if err := blockio.SetConfigFromFile(path, false); err != nil {
		return fmt.Errorf("runtime.blockio_config_file: %w: %w", err, fault.Invalid)
	}
	return nil
}

// FindRDT returns why this node lacks Intel RDT for the classes of a file; nil:
// it has RDT, or there is no file. It changes nothing.
func (c *Classes) FindRDT() error {
	if c.cfg.RDTFile == "" {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := rdt.Initialize(""); err != nil {
		return fmt.Errorf("this node has no Intel RDT: %w: %w", err, fault.Unavailable)
	}
	return nil
}

// Load makes the classes of RDT in the resctrl file system, and removes all
// others from it. A node without RDT is not an error: it refuses containers in
// a class later.
func (c *Classes) Load(ctx context.Context) error {
	if c.cfg.RDTFile == "" {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.rdtErr = rdt.Initialize(""); c.rdtErr != nil {
		slog.ErrorContext(ctx, "this node has no Intel RDT, containers in RDT classes will be refused", "err", c.rdtErr)
		return nil
	}
	if err := rdt.SetConfigFromFile(c.cfg.RDTFile, true); err != nil { // even if containers are in a class that is gone
		return fmt.Errorf("runtime.rdt_config_file %s: %w: %w", c.cfg.RDTFile, err, fault.Invalid)
	}
	return nil
}

// AddTo puts the container of a spec into its classes. If none are configured
// annotations have no effect, which is logged.
func (c *Classes) AddTo(ctx context.Context, s *specs.Spec, of Container) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.addBlockIO(ctx, s, of); err != nil {
		return err
	}
	return c.addRDT(ctx, s, of)
}

func (c *Classes) addBlockIO(ctx context.Context, s *specs.Spec, of Container) error {
	class, err := blockio.ContainerClassFromAnnotations(of.Name, of.Annotations, of.PodAnnotations)
	if err != nil || class == "" {
		return err
	}
	path := *c.blockIO.Load()
	if path == "" {
		tellNoEffect(ctx, of, "block I/O", class)
		return nil
	}
	s.Linux.Resources.BlockIO, err = settingsIn(path, class)
	return err
}

// BlockIO returns the settings for containers of a class.
func (c *Classes) BlockIO(class string) (*specs.LinuxBlockIO, error) {
	path := *c.blockIO.Load()
	if path == "" {
		return nil, fmt.Errorf("block I/O class %.80q: this node has none; set runtime.blockio_config_file: %w", class, fault.Precondition)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return settingsIn(path, class)
}

// settingsIn reads the file of classes again: new devices may have appeared.
func settingsIn(path, class string) (*specs.LinuxBlockIO, error) {
	if err := readBlockIO(path); err != nil {
		return nil, err
	}
	if known := blockio.GetClasses(); !slices.Contains(known, class) {
		return nil, fmt.Errorf("unknown block I/O class %.80q, %s has: %s: %w", class, path, strings.Join(known, ", "), fault.Invalid)
	}
	return blockio.OciLinuxBlockIO(class)
}

func (c *Classes) addRDT(ctx context.Context, s *specs.Spec, of Container) error {
	class, _ := kubernetes.ContainerClassFromAnnotations(rdt.RdtContainerAnnotation, rdt.RdtPodAnnotation, rdt.RdtPodAnnotationContainerPrefix,
		of.Name, of.Annotations, of.PodAnnotations)
	if class == "" {
		return nil
	}
	if c.cfg.RDTFile == "" {
		tellNoEffect(ctx, of, "RDT", class)
		return nil
	}
	if err := c.missingRDT(class); err != nil {
		return err
	}
	class, err := rdt.ContainerClassFromAnnotations(of.Name, of.Annotations, of.PodAnnotations)
	if err != nil { // it contains the class's name, however long
		return fmt.Errorf("%.200s; there are: %s: %w", err.Error(), strings.Join(rdtClasses(), ", "), fault.Invalid)
	}
	s.Linux.IntelRdt = intelRDT(class)
	return nil
}

// RDT returns the settings for containers of a class; nil: they stay in the
// default class.
func (c *Classes) RDT(class string) (*specs.LinuxIntelRdt, error) {
	if c.cfg.RDTFile == "" {
		return nil, fmt.Errorf("RDT class %.80q: this node has none; set runtime.rdt_config_file: %w", class, fault.Precondition)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.missingRDT(class); err != nil {
		return nil, err
	}
	if known := rdtClasses(); !slices.Contains(known, class) {
		return nil, fmt.Errorf("unknown RDT class %.80q, there are: %s: %w", class, strings.Join(known, ", "), fault.Invalid)
	}
	return intelRDT(class), nil
}

func (c *Classes) missingRDT(class string) error {
	if c.rdtErr == nil {
		return nil
	}
	return fmt.Errorf("RDT class %.80q: this node has no Intel RDT (%w): %w", class, c.rdtErr, fault.Unavailable)
}

func intelRDT(class string) *specs.LinuxIntelRdt {
	if class == rdt.RootClassName {
		return nil
	}
	return &specs.LinuxIntelRdt{ClosID: class}
}

func rdtClasses() (names []string) {
	for _, group := range rdt.GetClasses() {
		names = append(names, group.Name())
	}
	return names
}

func tellNoEffect(ctx context.Context, of Container, kind, class string) {
	slog.WarnContext(ctx, "class of a container has no effect, none are configured", "name", of.Name, "kind", kind, "class", class[:min(len(class), 80)]) // pods may write long names
}
