package alchemist.spark;

import java.util.Collections;
import java.util.Set;
import org.apache.spark.sql.Dataset;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.execution.datasources.v2.DataSourceV2Relation;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import scala.Option;

/** A matrix as a DataFrame of columns c0, c1, ...; the session calls it through py4j. */
public final class MatrixSource {
    private MatrixSource() {}

    /** Spark finds a source by its name in all its jars; a table needs no search. */
    public static Dataset<Row> frame(SparkSession spark, String spec, int partitions) {
        Table table = new Matrix(spec, partitions);
        return Dataset.ofRows(
                spark, DataSourceV2Relation.create(table, Option.empty(), Option.empty()));
    }

    private static DataType type(Element element) {
        switch (element) {
            case BOOL: return DataTypes.BooleanType;
            case INT32: return DataTypes.IntegerType;
            case INT64: return DataTypes.LongType;
            case FLOAT32: return DataTypes.FloatType;
            default: return DataTypes.DoubleType;
        }
    }

    private static final class Matrix implements SupportsRead, ScanBuilder, Scan, Batch {
        private final String spec;
        private final int count;
        private final long rows;
        private final StructType schema;

        Matrix(String spec, int partitions) {
            this.spec = spec;
            count = partitions;
            Target target = Target.parse(spec);
            rows = target.rows;
            StructField[] fields = new StructField[target.cols];
            for (int j = 0; j < fields.length; j++) {
                fields[j] = DataTypes.createStructField("c" + j, type(target.element), false);
            }
            schema = new StructType(fields);
        }

        @Override
        public String name() {
            return "matrix of an Alchemist gang";
        }

        @Override
        public String description() {
            return name();
        }

        @Override
        public StructType schema() {
            return schema;
        }

        @Override
        public StructType readSchema() {
            return schema;
        }

        @Override
        public Set<TableCapability> capabilities() {
            return Collections.singleton(TableCapability.BATCH_READ);
        }

        @Override
        public ScanBuilder newScanBuilder(CaseInsensitiveStringMap more) {
            return this;
        }

        @Override
        public Scan build() {
            return this;
        }

        @Override
        public Batch toBatch() {
            return this;
        }

        @Override
        public InputPartition[] planInputPartitions() {
            InputPartition[] parts = new InputPartition[count];
            for (int k = 0; k < count; k++) {
                parts[k] = new MatrixReaders.Rows(rows * k / count, rows * (k + 1) / count);
            }
            return parts;
        }

        @Override
        public PartitionReaderFactory createReaderFactory() {
            return new MatrixReaders(spec);
        }
    }
}
